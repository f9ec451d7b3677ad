"""Starts the workers of a run, and restarts it without a worker that was lost until it rejoins."""

import json
import math
import os
import random
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from towers.app.command_line import OTHER_FAILURE, Terminated, USER_MISTAKE, show
from towers.app.config import TrainConfig
from towers.app.continued import named_modules
from towers.app.launch.supervise import End, supervise
from towers.machine import nvidia
from towers.machine.signals import handled_by
from towers.machine.words import counted
from towers.app.run_dir import read_config
from towers.workers.cluster import LOST_WORKER

INSTALLED = "towers-train"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_HOST = "127.0.0.1"  # TensorFlow's gRPC connections are neither authenticated nor encrypted
# Linux uses higher ports for outgoing connections, including those between the workers.
_PORTS = range(10_000, 32_768)


def gpu_shares(num_workers: int, gpus_per_worker: int | None) -> list[str | None]:
    """Returns each worker's CUDA_VISIBLE_DEVICES, ["0,1", "2,3"]; None leaves it unchanged."""
    visible = os.environ.get(VISIBLE_GPUS)
    if gpus_per_worker is None:
        if num_workers > 1 and visible not in ("", "-1") and nvidia.driver_version():
            show(
                f"Warning   all {num_workers} workers see the same GPUs, and TensorFlow takes all "
                "of their memory. --gpus_per_worker gives each worker its own."
            )
        return [None] * num_workers
    needed = num_workers * gpus_per_worker
    names, where = _visible_gpus(visible, needed)
    if len(names) < needed:
        raise ValueError(
            f"--workers ({num_workers}) with --gpus_per_worker ({gpus_per_worker}) need {needed} "
            f"GPUs; {where} {len(names)}. Use less of either, or leave --gpus_per_worker out."
        )
    return [",".join(names[i : i + gpus_per_worker]) for i in range(0, needed, gpus_per_worker)]


def _visible_gpus(visible: str | None, needed: int) -> tuple[list[str], str]:
    """Returns the names of the GPUs that workers may have, and what says so, for an error.

    visible: CUDA_VISIBLE_DEVICES. needed: how many to take for there, if the driver does not tell.
    """
    if visible is None:
        gpus = nvidia.driver_gpus()
        num_gpus = needed if gpus is None else len(gpus)
        return list(map(str, range(num_gpus))), "this machine has"
    # As for CUDA, the list ends before the first entry that names no GPU.
    entries = map(str.strip, visible.split(","))
    names = list(takewhile(lambda name: name not in ("", "-1"), entries))
    return names, f"{VISIBLE_GPUS}={visible!r} names"


def free_addresses(count: int) -> list[str]:
    """Returns `count` different unused addresses of this machine, such as "127.0.0.1:12345"."""
    found: list[str] = []
    for port in random.sample(_PORTS, len(_PORTS)):  # two launchers find different ports
        with socket.socket() as trial, suppress(OSError):
            trial.bind((_HOST, port))
            found.append(f"{_HOST}:{port}")
        if len(found) == count:
            break
    return found


def launch(
    words: Sequence[str],
    shares: Sequence[str | None],
    max_restarts: int,
    min_workers: int,
    rejoin_after: float,
) -> int:
    """Runs a script, or -m and a module, with its arguments, in a worker for each of `shares`.

    A lost worker joins again at the first restart that comes `rejoin_after` seconds after its loss.
    Returns 0, or the exit code of the worker that explains the failure. After a signal, it raises
    KeyboardInterrupt or Terminated once the workers have ended.
    """
    _check_command(words)
    if not 1 <= min_workers <= len(shares):
        raise ValueError(
            f"--min_workers ({min_workers}) must be from 1 to --workers ({len(shares)})."
        )
    everybody, directory, stops, restarts = range(len(shares)), None, list[int](), 0
    left, lost_at = list(everybody), dict[int, float]()
    with handled_by(lambda number, frame: stops.append(number)):
        while True:
            command = [sys.executable, *words]
            if words[0] == INSTALLED:
                command[1:2] = ["-m", "towers"]
            ends, named = supervise(command, _environments([shares[i] for i in left]), stops)
            directory = named or directory
            why = cause(ends)
            if stops and (why is None or why.is_loss or why.is_stop) and any(e.code for e in ends):
                if stops[0] == signal.SIGINT:
                    raise KeyboardInterrupt
                raise Terminated(stops[0])
            if why is None:
                return 0
            if not why.is_loss:
                show(f"error: {why}.", is_error=True)
                return why.code
            words = again(words, directory)
            lost, what = loss(ends, why)
            now = time.monotonic()
            lost_at[left[lost]] = now
            # The last worker has no other one to continue without it.
            left = [
                i
                for i in everybody
                if now - lost_at.get(i, -math.inf) >= rejoin_after or left == [i]
            ]
            code = 0
            if restarts == max_restarts:
                code, reason = OTHER_FAILURE, f"after {counted(restarts, 'restart')}"
            elif len(left) < min_workers:
                code = LOST_WORKER
                reason = f"and --min_workers ({min_workers}) is more than the {len(left)} left"
            if code:
                remedy = f"To continue, give the launcher behind --: {shlex.join(words)}"
                show(f"error: {what}, {reason}. {remedy}", is_error=True)
                return code
            restarts += 1
            show(
                f"Restart   {what}: {shlex.join(words)} continues with "
                f"{counted(len(left), 'worker')} ({restarts} of {max_restarts})"
            )


def _check_command(words: Sequence[str]) -> None:
    """Raises ValueError unless the words begin with a script, -m and a module, or `INSTALLED`."""
    wrong = ""
    if not words or words == ["-m"]:
        wrong = "there is nothing to run"
    elif words[0] not in ("-m", INSTALLED) and not Path(words[0]).is_file():
        wrong = f"{words[0]!r} is no file in {Path.cwd()}"
    if wrong:
        raise ValueError(
            f"{wrong}. Behind -- give {INSTALLED} or the path of a script, and its flags, as in: "
            "python -m towers.launch --workers=2 -- train.py --num_towers=8"
        )


def _environments(shares: Sequence[str | None]) -> list[dict[str, str]]:
    """Returns the variables of each worker of a new cluster, with its share of the GPUs."""
    cluster, environments = {"worker": free_addresses(len(shares))}, []
    for index, gpus in enumerate(shares):
        task = {"cluster": cluster, "task": {"type": "worker", "index": index}}
        # Python without buffers shows lines at once.
        variables = {"TF_CONFIG": json.dumps(task), "PYTHONUNBUFFERED": "1"}
        if gpus is not None:
            variables[VISIBLE_GPUS] = gpus
        environments.append(variables)
    return environments


def cause(ends: Sequence[End]) -> End | None:
    """Returns the end that explains the others; None if all ended well, or as they were asked to.

    It prefers a user's mistake (of the lowest worker index), then a signal, then the first other
    failure, then a stop. A worker that ended because another one was lost comes last.
    """

    def weight(end: End) -> tuple[int, int]:
        if end.code == USER_MISTAKE:
            return 0, end.worker
        if end.code < 0:
            return 1, 0
        if end.is_loss:
            return 4, 0
        if end.is_stop:
            return 3, 0
        return 2, 0

    failed = [e for e in ends if e.code and not (e.was_asked and (e.is_loss or e.is_stop))]
    return min(failed, key=weight, default=None)


def loss(ends: Sequence[End], why: End) -> tuple[int, str]:
    """Returns the index of the worker to continue without, and a text that says what happened.

    It is the worker that a signal ended, else the worker that had to be killed, else the last one.
    """
    if why.code < 0:
        return why.worker, str(why)
    text = why.error or str(why)
    silent = next((end.worker for end in ends if end.was_killed), None)
    if silent is None:
        return max(end.worker for end in ends), text
    return silent, f"{text}; worker {silent} did not end and was killed"


def again(words: Sequence[str], announced: str | None) -> list[str]:
    """Returns the command that continues a run, whose directory the chief has `announced`.

    For train.py it is `--resume` with the run's directory, which holds all other flags. A command
    that resumes already, that has not begun a run yet, or that is another script stays the same.
    """
    is_train = Path(words[0]).name in ("train.py", INSTALLED)
    resumes = any(word.startswith(("--resume", "-resume")) for word in words)
    text = read_config(announced) if announced and is_train and not resumes else None
    if text is None:
        return list(words)
    command = [words[0], f"--resume={announced}"]
    if named_modules(TrainConfig.from_json(text)):  # this command has named them
        command.append("--trust_run_dir")
    return command
