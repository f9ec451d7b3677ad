"""A worker's command: a Python script; the same again, or `train.py --resume`, after a loss."""

import re
import shlex
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from towers.resume.remote_files import holds_run
from towers.app.launch.screen import without_escapes

_TRAIN = "train.py"
_INSTALLED = "towers-train"
_EXAMPLE = "python -m towers.launch --workers=2 -- train.py --num_towers=8"
_INTERPRETER = re.compile(r"python[\d.]*(\.exe)?")
_TITLE = re.compile(r"towers \d[\w.]* \| .*\| run: (.+)")  # see `report.title_line`


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own arguments, and the command behind --.

    Raises:
        ValueError: a script follows without --, and its flags would look like the launcher's.
    """
    if "--" in argv:
        dashes = list(argv).index("--")
        return list(argv[:dashes]), list(argv[dashes + 1:])
    script = next((word for word in argv[1:] if Path(word).is_file()), None)
    if script is not None:
        raise ValueError(f"put -- in front of {script!r}, as in {_EXAMPLE}")
    return list(argv), []


def check(words: Sequence[str]) -> None:
    """Refuses what Python could not run.

    Args:
        words: a script and its arguments, or -m, a module and its arguments.

    Raises:
        ValueError: there is no such script.
    """
    if not words:
        raise ValueError(f"there is nothing to run: give the command behind --, as in {_EXAMPLE}")
    script = words[0]
    if script == "-m" and len(words) > 1:
        return
    if _INTERPRETER.fullmatch(Path(script).name):
        raise ValueError(
            f"{script!r} comes by itself: begin the command with the script, as in {_EXAMPLE}"
        )
    if not Path(script).is_file() and script != _INSTALLED:
        raise ValueError(
            f"{script!r} is no file in {Path.cwd()}. Begin the command with {_INSTALLED}, or with "
            f"the path of a script, as in {_EXAMPLE}"
        )


def python(words: Sequence[str]) -> list[str]:
    """The whole command of a worker."""
    start = ["-m", "towers"] if words[0] == _INSTALLED else [words[0]]
    return [sys.executable, *start, *words[1:]]


def shown(words: Sequence[str]) -> str:
    """The command as one would type it."""
    return shlex.join(words)


def typed(words: Sequence[str]) -> str:
    """The command as a shell starts it, without a launcher."""
    return shown(words if words[0] == _INSTALLED else ["python", *words])


def title(words: Sequence[str]) -> str:
    """Its script, with --resume where it goes on: "train.py --resume=runs/cnn-mnist-001"."""
    directory = _flag(words, "resume")
    name = words[1] if words[0] == "-m" else Path(words[0]).name
    return name if directory is None else f"{name} --resume={directory}"


def resumes(words: Sequence[str]) -> bool:
    """Whether the command goes on with a run."""
    return _flag(words, "resume") is not None


def again(words: Sequence[str], announced: str | None) -> list[str]:
    """The command that goes on after a worker was lost.

    Of train.py, `--resume` of the run's directory in place of all other flags, which the run has
    recorded. Before there is such a run, of any other script, and where the command resumes a run
    already, perhaps with a larger --epochs: the same command.

    Args:
        words: the command that has run.
        announced: the directory that the chief has named, if it has.
    """
    if Path(words[0]).name not in (_TRAIN, _INSTALLED) or resumes(words):
        return list(words)
    directory = announced or _flag(words, "run_dir")
    if directory is None or not holds_run(directory):
        return list(words)
    return [words[0], f"--resume={directory}"]


def announced_directory(line: bytes) -> str | None:
    """The run's directory, if this is the line in which train.py names it."""
    found = _TITLE.fullmatch(without_escapes(line).decode(errors="replace").strip())
    return found[1] if found else None


def _flag(words: Sequence[str], name: str) -> str | None:
    """A flag's value, as absl would read it: of several, the last."""
    value = None
    for word, following in zip_longest(words[1:], words[2:]):
        flag, is_assigned, text = word.partition("=")
        if flag in (f"--{name}", f"-{name}"):
            value = text if is_assigned else following
    return value
