"""launch: the workers of a run, again with one less as often as one was lost."""

import os
import signal
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import NoReturn

from towers.app.command_line import OTHER_FAILURE, Terminated
from towers.app.launch import command
from towers.app.launch.screen import Screen
from towers.app.launch.supervise import (
    End,
    Ended,
    cause,
    in_words,
    lost_worker,
    passed_on,
    supervise,
)
from towers.app.launch.worker_environment import VARIABLE, free_addresses, tf_config
from towers.machine.words import plural

_ERROR = b"error: "


def launch(words: Sequence[str], shares: Sequence[str | None], max_restarts: int) -> int:
    """Runs the workers; returns the exit code: 0, or that of the first worker that failed.

    Args:
        words: a script and its arguments.
        shares: each worker's CUDA_VISIBLE_DEVICES; None leaves it as it is.
        max_restarts: how often the run goes on without a worker that was lost.

    Raises:
        ValueError: there is no such script, or a worker cannot be started.
        KeyboardInterrupt: Ctrl-C has come, or Terminated: another signal; the workers have ended.
    """
    command.check(words)
    screen, left, directory = Screen(), list(shares), None
    with passed_on() as stop:
        for restarts in count():
            ended = supervise(command.python(words), _environments(left), screen, stop)
            directory = ended.directory or directory
            why = cause(ended.ends)
            if stop.number is not None and (why is None or why.is_loss or why.is_stop):
                if any(end.code for end in ended.ends):
                    _raise_stopped(stop.number)
                return 0
            if why is None:
                return 0
            if not why.is_loss:
                _show_failure(screen, ended, why)
                return why.code
            words = command.again(words, directory)
            if restarts == max_restarts:
                _show_loss(screen, ended, why, words, left, restarts)
                return OTHER_FAILURE
            if len(left) > 1:
                del left[lost_worker(ended.ends, why)]
            line = _restart_line(ended, why, words, len(left))
            screen.line(f"Restart   {line} ({restarts + 1} of {max_restarts})".encode())
    raise AssertionError("restarts are counted")


def _environments(shares: Sequence[str | None]) -> list[dict[str, str]]:
    """Each worker's: TF_CONFIG, its GPUs, and where `towers` is, installed or not."""
    root = str(Path(__file__).parents[3])
    shared = {
        "PYTHONUNBUFFERED": "1",  # lines come when they are written, not when there are many
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    addresses = free_addresses(len(shares))
    found = []
    for index, share in enumerate(shares):
        own = {} if share is None else {VARIABLE: share}
        found.append({**shared, "TF_CONFIG": tf_config(addresses, index), **own})
    return found


def _restart_line(ended: Ended, why: End, words: Sequence[str], num_workers: int) -> str:
    """"worker 1 was killed by SIGKILL: train.py --resume=runs/x goes on with 1 worker"."""
    goes_on = "goes on" if command.resumes(words) else "starts again"
    workers = f"{num_workers} {plural('worker', num_workers)}"
    return f"{_loss(ended, why)}: {command.title(words)} {goes_on} with {workers}"


def _loss(ended: Ended, why: End) -> str:
    """Names the lost worker: as the system does, or as the worker does that has missed it."""
    said = [line for line in ended.errors[why.worker] if line.startswith(_ERROR)]
    if why.code < 0 or not said:
        return in_words(why)
    text = said[0].removeprefix(_ERROR).decode(errors="replace").rstrip(". ")
    names = [f"worker {end.worker} " for end in ended.ends if end.killed]
    if not names or text.startswith(names[0]):
        return text
    return f"{text}; {names[0]}did not end and was killed"


def _show_failure(screen: Screen, ended: Ended, why: End) -> None:
    """The failed worker's own words; the chief's as they are."""
    lines = ended.errors[why.worker]
    for line in lines:
        if why.worker and line.startswith(_ERROR):
            line = b"error: worker %d: %s" % (why.worker, line.removeprefix(_ERROR))
        elif why.worker:
            line = b"[worker %d] %s" % (why.worker, line)
        screen.line(line, is_error=True)
    if not lines:
        screen.line(_ERROR + f"{in_words(why)}.".encode(), is_error=True)


def _show_loss(
    screen: Screen, ended: Ended, why: End, words: Sequence[str], shares: Sequence[str | None],
    restarts: int,
) -> None:
    """One line, with the way to go on; before it, what a crash has left."""
    if why.code < 0 and ended.errors[why.worker]:
        _show_failure(screen, ended, why)
    after = f" after {restarts} {plural('restart', restarts)}" if restarts else ""
    line = f"error: {_loss(ended, why)}{after}."
    if command.resumes(words):
        flags = f"--workers={len(shares)}"
        if shares[0] is not None:
            flags += f" --gpus_per_worker={len(shares[0].split(','))}"
        line += f" It goes on with: python -m towers.launch {flags} -- {command.shown(words)}"
    screen.line(line.encode(), is_error=True)


def _raise_stopped(number: int) -> NoReturn:
    """Ends this process as a signal ends any command."""
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)
