"""Finds the step at which two runs of train.py part, and what came first.

    python -m towers.compare runs/first runs/second

    ledger.csv of both           the first line that differs
    the last common checkpoint   both runs make their steps again, with a line for each
    the first step that differs  batch, seeds, outputs of layers, gradients, update

If the package is installed, `towers-compare` runs this command. The exit code is 0 if the runs are
equal, 1 if they differ, and 2 if they cannot be compared.
"""

import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from towers.app import child_process, command_line, run_dir
from towers.app.config import MADE_WITH, TrainConfig, fields_with
from towers.app.fields import Role
from towers.machine import files, terminal
from towers.machine.words import printable
from towers.resume import checkpoints, directories

EQUAL, DIFFERENT, NOT_COMPARABLE = 0, 1, 2


def compare(
    first: Path, second: Path, replay: Callable[[Path, int], dict[str, Any]]
) -> tuple[int, list[str]]:
    """Compares two runs; returns the exit code and the lines that explain it.

    first, second: the directories of runs, or files that `towers.Ledger` wrote.
    replay: makes a run's steps again, up to a step; returns the result of `replay.replay`.
    """
    from towers.resume.ledger import LEDGER, Line, read_ledger  # starts TensorFlow: see `main`

    runs = first, second
    lines, reason = _settings(*runs)
    paths = [path / LEDGER if path.is_dir() else path for path in runs]
    pairs = list(zip(*map(read_ledger, paths), strict=False))
    if not pairs:
        reason = f"no line of {LEDGER} is common to both"
    parted = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if parted is not None and parted[0].step != parted[1].step:
        reason = "the lines are of other steps, because --ledger differs"
    if reason:
        return NOT_COMPARABLE, [*lines, f"not comparable: {reason}"]
    if parted is None:
        count = f"all {len(pairs)} lines that both have, to step {pairs[-1][0].step:,}"
        return EQUAL, [*lines, f"equal: {count}"]
    columns = [name for name, a, b in zip(Line._fields, *parted, strict=True) if a != b]
    step = parted[0].step
    lines.append(f"first line that differs: step {step:,}, in {', '.join(columns)}")
    cause = {"batch": "data", "seeds": "noise", "parameters": "gradient or update"}
    by_line = next(cause[name] for name in cause if name in columns)
    try:
        return DIFFERENT, [*lines, *_made_again(runs, step, replay)]
    except (ValueError, checkpoints.DamagedError) as error:
        return DIFFERENT, [
            *lines,
            f"cannot be made again: {command_line.as_flags(str(error))}",
            f"came first: {by_line}",
        ]


def _settings(*runs: Path) -> tuple[list[str], str]:
    """Returns lines about settings that differ, and why the runs are not comparable, or ""."""
    made, configs = [], []
    for path in runs:
        text = run_dir.read_config(path, "run")
        if text is None:  # a file of `towers.Ledger`, which has no settings
            return [], ""
        try:
            configs.append(vars(TrainConfig.from_json(text)))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        made.append(json.loads(text).get(MADE_WITH) or {})
    roles = Role.FREE | Role.ONCE | Role.LOCAL
    if all(config["schedule"] not in ("cosine", "linear") for config in configs):
        roles |= Role.LIMIT  # these schedules end with the run, so its end changes each step
    ignored = fields_with(roles)
    lines = [
        printable(f"setting that differs: {name} ({value}, {configs[1][name]})")
        for name, value in configs[0].items()
        if name not in ignored and value != configs[1][name]
    ]
    other = [name for name in made[0] if made[0][name] != made[1].get(name)]
    values = (f"another {name} ({made[0][name]}, {made[1].get(name)})" for name in other)
    return lines, printable(", ".join(values))


def _made_again(
    runs: Sequence[Path], step: int, replay: Callable[[Path, int], dict[str, Any]]
) -> Iterator[str]:
    """Yields lines about the first step that differs if both runs make their steps again.

    step: the step of the first line that differs.
    """
    begin, changed = _common_checkpoint(runs, step)
    if begin is None:
        yield f"came first: {changed}"
        return
    with tempfile.TemporaryDirectory(prefix="towers-compare-") as folder:
        copies = [_copied(run, begin, Path(folder, str(i))) for i, run in enumerate(runs)]
        found = [replay(copy, step) for copy in copies]
        pairs = zip(found[0]["lines"], found[1]["lines"], strict=True)
        earlier = next((a[1] for a, b in pairs if a != b), None)
        if earlier is not None:
            step = earlier
            found = [replay(copy, step) for copy in copies]
    cause = next(_causes(*found), "")
    if cause:
        yield f"made again from {begin}: step {step:,} is the first that differs"
    else:
        yield f"made again from {begin}: both runs make equal steps to step {step:,}"
        cause = changed or "a fault of a machine, or a change by hand, of one of them"
    yield f"came first: {cause}"


def _copied(run: Path, checkpoint: str, copy: Path) -> Path:
    """Copies what a replay from a checkpoint needs; returns the copy's directory."""
    inside = Path(directories.CHECKPOINTS, checkpoint)
    shutil.copytree(run / inside, copy / inside, symlinks=True)
    shutil.copy(run / run_dir.CONFIG, copy, follow_symlinks=False)
    return copy


def _common_checkpoint(runs: Sequence[Path], step: int) -> tuple[str | None, str]:
    """Returns the newest equal checkpoint before a step, and what differs in the one after it.

    Raises ValueError if the runs have no common checkpoint before the step.
    """
    folder, other = (run / directories.CHECKPOINTS for run in runs)
    names = [path.name for path in checkpoints.find(other)]
    changed = ""
    for path in checkpoints.find(folder):
        if path.name in names and checkpoints.step_of(path) < step:
            both = checkpoints.read(path), checkpoints.read(other / path.name)
            difference = next(_differences(*both), "")
            if not difference:
                return path.name, changed
            changed = f"{difference}, already in {path.name}"
    if changed:
        return None, changed
    raise ValueError(
        "the runs keep no common checkpoint before this step. Train both with a larger "
        "`keep_checkpoints`, and with the same `checkpoint_every`"
    )


def _differences(first: checkpoints.Checkpoint, second: checkpoints.Checkpoint) -> Iterator[str]:
    """Yields causes by which two checkpoints differ, from the first to the last in a step."""
    pairs = zip(first.arrays.items(), second.arrays.values(), strict=False)
    names = [name for (name, a), b in pairs if a.tobytes() != b.tobytes()]
    for cause in ("noise", "parameters", "update"):
        yield from (f"{cause}: {name}" for name in names if _cause_of(name) == cause)


def _causes(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Yields causes by which the digests of one step differ, in the order of their computation."""
    of = {part: _places(first[part], second[part]) for part in first if part != "lines"}
    yield from (f"data: the {name}" for name in of["batch"])
    for cause in ("noise", "parameters"):
        yield from (f"{cause}: {name}" for name in of["state"] if _cause_of(name) == cause)
    yield from (f"gradient: the output of layer {name}" for name in of["outputs"])
    yield from (f"gradient: {name}" for name in of["gradients"])
    yield from (f"update: {name}" for name in (*of["state"], *of["update"]))


def _places(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    """Returns the names of values that differ; a process may have counted its names otherwise."""
    pairs = zip(first.items(), second.items(), strict=False)
    return [name for (name, value), (_, other) in pairs if value != other]


def _cause_of(name: str) -> str:
    """Returns what a variable named "model/3/dense/kernel" is for; "" for a metric."""
    if "seed_generator_state" in name:
        return "noise"
    return {"model": "parameters", "optimizer": "update"}.get(name.partition("/")[0], "")


def _replay(more: Sequence[str], run: Path, step: int) -> dict[str, Any]:
    """Runs `--replay` in another process, because cpu_threads may differ.

    more: further flags, such as "--trust_run_dir".
    """
    with tempfile.TemporaryDirectory(prefix="towers-compare-") as folder:
        file = Path(folder, "replay.json")
        own = [f"--replay={run}", f"--at={step}", f"--out={file}"]
        error = child_process.run([sys.executable, "-m", "towers", *own, *more])
        if error is not None:
            raise ValueError(printable(f"{run}: {error}"))
        return json.loads(files.read_text(file, checkpoints.LARGEST_MANIFEST))  # type: ignore[no-any-return]


def run(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    runs = [Path(word) for word in argv[1:] if not word.startswith("--")]
    more = [word for word in argv[1:] if word.startswith("--")]
    if "--help" in more:
        command_line.show(str(__doc__))
        return EQUAL
    if len(runs) != 2:
        raise ValueError("compare needs two directories of runs: towers-compare RUN_A RUN_B.")
    for path in runs:
        if not path.exists():
            raise ValueError(f"{path} does not exist: give the directory of a run.")
    code, lines = compare(runs[0], runs[1], functools.partial(_replay, more))
    command_line.show("\n".join(lines))
    return code


def main(argv: list[str] | None = None) -> int:
    """Runs a command line, by default the process' arguments, and returns its exit code."""
    with terminal.quiet_stderr():  # for what TensorFlow prints when it starts
        return command_line.exit_code(lambda: run(argv or sys.argv))
