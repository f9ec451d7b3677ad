"""Trains a model with synchronous data parallelism: one tower for each GPU, one update on the CPU.

    python train.py --num_gpus=8 --batch_size=128

Every flag has a default. A machine without GPUs runs the same command on logical CPU devices.
If the package is installed, `towers-train` runs this command.
"""

import dataclasses
import json
import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from absl import flags

import towers
from towers.app import command_line
from towers.app.after_training.model_files import USED, file_config, find_file
from towers.app.config import TrainConfig
from towers.app.continued import resolve_config
from towers.app.reporting.runs import list_runs
from towers.machine import terminal
from towers.app import run_dir
from towers.resume.directories import write_text

if __name__ != "__main__":
    flags.disclaim_key_flags()  # flags defined here count as the command's, for --help


def define_flags() -> None:
    """Defines a flag for each field of TrainConfig, and the flags that do not train."""
    command_line.define_fields(TrainConfig)
    flags.DEFINE_boolean(
        "devices",
        False,
        "Print versions, libraries, GPUs, CPU and the devices "
        "that towers would get; train nothing.",
    )
    flags.DEFINE_boolean(
        "runs",
        False,
        "List the runs in runs/, or beside --run_dir: epochs done, best --monitor, and whether "
        "they are complete; train nothing.",
    )
    for name, result in (
        ("evaluate", "print its loss and metrics"),
        ("predict", "write its outputs to --out, in the data's order"),
    ):
        flags.DEFINE_string(
            name,
            None,
            f"A .keras file, or a run's directory for its best.keras: "
            f"{result}, for the test data, on all towers; train nothing. Data and "
            "batch come from the file's run, unless they are given.",
        )
    flags.DEFINE_string(
        "replay",
        None,
        "A run's directory: makes the step --at again from a checkpoint, on any number of devices, "
        "and prints digests of its batch, outputs, gradients and update.",
    )
    flags.DEFINE_integer("at", None, "With --replay, the step, counted from 1.", 1)
    flags.DEFINE_string(
        "audit",
        None,
        "A run's directory: makes --epoch again from its checkpoint, and compares it with "
        "ledger.csv and results.csv. Exit code 0: all digests are equal; 1: one differs.",
    )
    flags.DEFINE_integer("epoch", None, "With --audit, the epoch, counted from 1.", 1)
    flags.DEFINE_string(
        "out",
        None,
        "With --predict, a new file: .npz for all outputs, .csv for "
        "label and probability, beside the names of image files and of classes. With "
        "--evaluate, a new .png file for the confusion matrix of a classifier.",
    )


def parse_flags(argv: list[str]) -> TrainConfig | None:
    """Returns the command line's configuration; for --help, prints the help and returns None."""
    if not command_line.parse_flags(argv, __doc__):
        return None
    evaluate, predict, out = (flags.FLAGS[name].value for name in ("evaluate", "predict", "out"))
    _check_modes()
    if predict and not out:
        raise ValueError(f"predict ({predict}) needs `out`, a new file: out=predictions.npz.")
    ending = ".png" if evaluate else ".json" if flags.FLAGS.replay else None
    if out and not predict and not (ending and out.endswith(ending)):
        raise ValueError(
            f"out ({out}) needs `predict`. A .png file may stand beside `evaluate`, and a .json "
            "file beside `replay`."
        )
    found: list[Any] = [flags.FLAGS[field.name] for field in dataclasses.fields(TrainConfig)]
    given = {flag.name: flag.value for flag in found if flag.present}
    if flags.FLAGS.replay or flags.FLAGS.audit:
        return TrainConfig(**given)  # the run's own configuration comes with its checkpoint
    return file_config(_model_file(), given) if evaluate or predict else resolve_config(given)


def _check_modes() -> None:
    """Raises ValueError if flags want two things at once, or half of one."""
    for mode, which in (("replay", "at"), ("audit", "epoch")):
        if bool(flags.FLAGS[mode].value) != bool(flags.FLAGS[which].value):
            raise ValueError(f"`{mode}` and `{which}` need each other: give both.")
    modes = [
        f"`{name}`"
        for name in ("devices", "runs", "evaluate", "predict", "replay", "audit", "resume")
        if flags.FLAGS[name].value
    ]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)}: give only one of them.")


def _model_file() -> Path:
    """Returns the file of the trained model that --evaluate or --predict names."""
    name = "evaluate" if flags.FLAGS.evaluate else "predict"
    return find_file(str(flags.FLAGS[name].value), name)


def _unused_flags() -> list[str]:
    """Returns the given flags that only training reads."""
    names = {field.name for field in dataclasses.fields(TrainConfig)} - USED
    return [f"--{name}" for name in flags.FLAGS if name in names and flags.FLAGS[name].present]


def run_without_training(config: TrainConfig) -> None:
    """Prints the available devices, evaluates a trained model, or writes its predictions."""
    from towers.machine import environment

    environment.check()  # before the imports below, which start TensorFlow
    from towers.app.after_training.predicting import evaluate_file, predict_file
    from towers.app.diagnosis.describe import device_report
    from towers.app.reporting.report import Report, report_of
    from towers.workers.workers import join_workers

    if flags.FLAGS.devices:
        with closing(Report()) as out, out.show_warnings():
            for line in device_report(config):
                out.line(line)
        return
    report = report_of(join_workers(), "the chief shows the result")
    with closing(report) as out, out.show_warnings():
        if unused := _unused_flags():
            out.warn(f"{', '.join(unused)}: no effect, because nothing is trained.")
        path = flags.FLAGS.out and os.path.expanduser(flags.FLAGS.out)
        if flags.FLAGS.evaluate:
            evaluate_file(config, _model_file(), out, path)
        else:
            predict_file(config, _model_file(), path, out)


def make_again(config: TrainConfig) -> int:
    """Makes a step or an epoch of a run again; returns the exit code."""
    from towers.machine import environment

    environment.check()
    from towers.app.after_training.predicting import check_new
    from towers.app.after_training.replay import audit, replay
    from towers.app.reporting.report import Report
    from towers.resume.directories import explained

    given, values = config.given(), flags.FLAGS
    path = Path(values.out).expanduser() if values.out else None
    check_new(path)
    with closing(Report()) as out, out.show_warnings():
        if values.audit:
            return 0 if audit(given, values.audit, values.epoch, out) else 1
        found = replay(given, values.replay, values.at, out)
    if path:
        with explained(path, "out"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(found))
    return 0


def train(argv: list[str]) -> int:
    """Runs the command that the arguments select, and returns its exit code.

    Libraries' messages go to the run's log.txt.
    """
    config = parse_flags(argv)
    if config is None:
        return 0
    if flags.FLAGS.runs:
        beside = Path(config.run_dir).parent if config.run_dir else run_dir.RUNS
        command_line.show("\n".join(list_runs(beside)))
        return 0
    with (
        nullcontext() if command_line.is_verbose() else terminal.quiet_stderr() as captured,
        command_line.users_lines_named(captured),
    ):
        if flags.FLAGS.replay or flags.FLAGS.audit:
            return make_again(config)
        if flags.FLAGS.devices or flags.FLAGS.evaluate or flags.FLAGS.predict:
            run_without_training(config)
        else:
            towers.train(config, captured=captured)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs a command line, by default the process' arguments, and returns its exit code."""
    define_flags()
    return command_line.exit_code(lambda: train(argv or sys.argv))


if __name__ == "__main__":
    sys.exit(main())
