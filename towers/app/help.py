"""Writes the --help text: a command's flags in groups, the most used flags first."""

import sys
from collections.abc import Iterable

from absl import flags

MOST_USED = (
    "model", "dataset", "data_dir", "epochs", "batch_size", "num_gpus", "num_towers", "optimizer",
    "learning_rate", "run_dir", "resume", "seed",
)
GROUPS = {  # keys: NAME in --help=NAME; values: the group's title and flags
    "model": ("Model", ("model", "init_from", "freeze", "dropout", "precision")),
    "data": ("Data", (
        "dataset", "data_dir", "image_size", "features", "data_workers", "data_timeout",
        "shuffle_buffer", "augment", "class_weight",
    )),
    "optimization": ("Optimization", (
        "epochs", "max_steps", "batch_size", "batch_size_per_gpu", "optimizer", "learning_rate",
        "schedule", "warmup_steps", "weight_decay", "momentum", "clip_norm", "ema",
        "label_smoothing", "batch_norm", "nonfinite", "seed", "early_stopping",
    )),
    "devices": ("Devices and workers", (
        "num_gpus", "num_towers", "accumulate", "logical_gpus", "device", "variable_device",
        "strategy", "gpus_per_tower", "stages", "jit_compile", "cpu_threads", "deterministic",
        "worker_timeout", "devices", "plan",
    )),
    "saving": ("Saving and resuming", (
        "run_dir", "resume", "trust_run_dir", "checkpoint_every", "hang_timeout", "monitor",
        "monitor_mode", "callbacks",
    )),
    "reports": ("Reports", ("tensorboard", "histograms", "profile", "verify_gradients")),
    "after": ("After training", ("evaluate", "predict", "out", "export", "export_pixels")),
}


def asked_for(argv: list[str]) -> str | None:
    """Returns NAME of `--help=NAME`, "" for `--help`, or None if the arguments have neither."""
    for word in argv[1:]:
        name, _, group = word.lstrip("-").partition("=")
        if word.startswith("-") and name in ("help", "h", "helpshort", "helpfull"):
            return group
    return None


def help_text(introduction: str, group: str = "") -> str:
    """Returns the help of the command that this process runs.

    Args:
        introduction: the text before the flags.
        group: a key of `GROUPS` whose flags alone are listed; "" lists all flags.

    Raises:
        ValueError: the command has no such group.
    """
    own = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}
    groups = {
        name: (title, listed) for name, (title, members) in GROUPS.items()
        if (listed := [flag for flag in members if flag in own])
    }
    if group:
        if group not in groups:
            raise ValueError(f"--help ({group}) must be one of {', '.join(groups)}.")
        title, listed = groups[group]
        return f"{title}:\n{_lines(own[name] for name in listed)}"
    most_used = MOST_USED if own.keys() >= set(MOST_USED) else ()
    known = {name for _, listed in groups.values() for name in listed}
    sections = [("Most used", most_used), ("This command", own.keys() - known)] + [
        (f"{title} (--help={name})", [flag for flag in listed if flag not in most_used])
        for name, (title, listed) in groups.items()
    ]
    return "\n\n".join([
        introduction.strip(),
        *(f"{title}:\n{_lines(own[name] for name in listed)}" for title, listed in sections
          if listed),
        "Every command: --flagfile=FILE reads flags from a file; --verbosity=1 shows the messages "
        "of\nlibraries, and a traceback with each error.",
    ])


def _lines(listed: Iterable[flags.Flag]) -> str:
    group = flags.FlagValues()
    for flag in listed:
        group[flag.name] = flag
    return group.get_help("  ", include_special_flags=False)
