"""Starts the workers of a run, and restarts with one worker less after a worker was lost."""

import re
import shlex
import signal
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from towers.app.command_line import OTHER_FAILURE, USER_MISTAKE, Terminated, show
from towers.app.launch.supervise import End, supervise
from towers.app.launch.worker_environment import INSTALLED, worker_environments
from towers.machine.signals import handled_by
from towers.machine.words import counted
from towers.resume.run_dir import read_config


def launch(words: Sequence[str], shares: Sequence[str | None], max_restarts: int) -> int:
    """Runs the workers; returns 0, or the exit code of the worker that explains the failure.

    Args:
        words: a script and its arguments.
        shares: each worker's CUDA_VISIBLE_DEVICES; None leaves it as it is.
        max_restarts: how often the run continues after a lost worker; then returns OTHER_FAILURE.

    Raises:
        ValueError: there is no such script.
        KeyboardInterrupt or Terminated: Ctrl-C or another signal came, and the workers have ended.
    """
    _check(words)
    left, directory, stops = list(shares), None, list[int]()
    with handled_by(lambda number, frame: stops.append(number)):
        for restarts in count():
            start = ["-m", "towers"] if words[0] == INSTALLED else [words[0]]
            ends, named = supervise(
                [sys.executable, *start, *words[1:]], worker_environments(left), stops
            )
            directory = named or directory
            why = cause(ends)
            if stops and (why is None or why.is_loss or why.is_stop) and any(e.code for e in ends):
                raise KeyboardInterrupt if stops[0] == signal.SIGINT else Terminated(stops[0])
            if why is None:
                return 0
            if not why.is_loss:
                for line in why.errors or [f"error: {why}."]:
                    show(line, is_error=True)
                return why.code
            words = again(words, directory)
            lost, what = loss(ends, why)
            if restarts == max_restarts:
                for line in why.errors if why.code < 0 else ():
                    show(line, is_error=True)
                show(f"error: {what}, after {counted(restarts, 'restart')}. To continue, give the "
                     f"launcher behind --: {shlex.join(words)}", is_error=True)
                return OTHER_FAILURE
            if len(left) > 1:
                del left[lost]
            show(
                f"Restart   {what}: {shlex.join(words)} continues with "
                f"{counted(len(left), 'worker')} ({restarts + 1} of {max_restarts})"
            )
    raise AssertionError("restarts are counted")


def _check(words: Sequence[str]) -> None:
    """Raises ValueError unless the words are a script, or -m and a module, with arguments."""
    is_module = len(words) > 1 and words[0] == "-m"
    if not (words and (is_module or words[0] == INSTALLED or Path(words[0]).is_file())):
        given = f"{words[0]!r} is no file in {Path.cwd()}" if words else "there is nothing to run"
        raise ValueError(
            f"{given}. Behind -- give {INSTALLED} or the path of a script, and its flags, as in: "
            "python -m towers.launch --workers=2 -- train.py --num_towers=8"
        )


def cause(ends: Sequence[End]) -> End | None:
    """Returns the end that explains the others; None if all ended well, or as they were asked to.

    It prefers a user's mistake (of the lowest worker index), then a signal, then another failure,
    then a stop. A worker that ended because another one was lost comes last.

    Args:
        ends: the ends of all workers, in the order in which they came.
    """
    def weight(end: End) -> tuple[int, int]:
        if end.code == USER_MISTAKE:
            return 0, end.worker
        if end.is_loss:
            return 1 if end.code < 0 else 4, 0
        return 3 if end.is_stop else 2, 0

    failed = [e for e in ends if e.code and not (e.was_asked and (e.is_loss or e.is_stop))]
    return min(failed, key=weight, default=None)


def loss(ends: Sequence[End], why: End) -> tuple[int, str]:
    """Returns the index of the worker to continue without, and a text that says what happened.

    It is the worker that a signal ended, else the worker that had to be killed, else the last one.
    """
    if why.code < 0:
        return why.worker, str(why)
    said = [line.partition("error: ")[2].rstrip(". ") for line in why.errors]
    text = next(filter(None, said), str(why))
    silent = next((end.worker for end in ends if end.was_killed), None)
    if silent is None:
        return max(end.worker for end in ends), text
    return silent, f"{text}; worker {silent} did not end and was killed"


def again(words: Sequence[str], announced: str | None) -> list[str]:
    """Returns the command that continues after a worker was lost.

    For train.py it is `--resume` with the run's directory, which holds all other flags. A command
    that resumes already, that has not begun a run yet, or that is another script stays the same.

    Args:
        words: the command that ran.
        announced: the run's directory that the chief printed, or None.
    """
    given = "\0".join(words)  # absl takes --name=value and --name value; the last one counts
    run_dirs = [*re.findall(r"\0--?run_dir[=\0]([^\0]*)", given), *filter(None, [announced])]
    is_new = Path(words[0]).name in ("train.py", INSTALLED) and "\0--resume" not in given
    if is_new and run_dirs and read_config(run_dirs[-1]) is not None:
        return [words[0], f"--resume={run_dirs[-1]}"]
    return list(words)
