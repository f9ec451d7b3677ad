"""A part of the benchmarks in a fresh process, which never outlives the one that started it."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class ProcessError(RuntimeError):
    """A process failed.

    reason: its exception, else the end of what it wrote.
    written: all that it wrote to stderr.
    """

    def __init__(self, message: str, reason: str, written: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.written = written


class TookTooLongError(ProcessError):
    """A process was ended at its limit."""


def run_process(
    module: str, *, num_workers: int = 1, limit: float | None = None, **flags: Any
) -> dict[str, Any]:
    """One process of `python -m benchmarks.<module>`; returns the JSON of its last line.

    Args:
        module: a module of this package.
        num_workers: more than 1: so many processes, which train together; the JSON is the chief's.
        limit: seconds after which it is killed; None: it may take as long as it likes.
        flags: the flags of the process.

    Raises:
        TookTooLongError: it was killed at its limit.
        ProcessError: it failed.
    """
    if num_workers > 1:
        return run_workers(module, num_workers, limit=limit, **flags)[0]
    return json.loads(_output([sys.executable], module, limit, flags).splitlines()[-1])


def run_workers(
    module: str, num_workers: int, *, limit: float | None = None, **flags: Any
) -> list[dict[str, Any]]:
    """Runs a command as `num_workers` workers; returns the JSON line of each, the chief's first."""
    launcher = [sys.executable, "-m", "towers.app.launch", f"--workers={num_workers}"]
    out = _output([*launcher, "--max_restarts=0", "--"], module, limit, flags)
    found = re.findall(r"^(?:\[worker (\d+)\] )?(\{.*\})$", out, re.M)
    return [json.loads(text) for _, text in sorted(found, key=lambda line: int(line[0] or 0))]


def _output(
    start: Sequence[str], module: str, limit: float | None, flags: Mapping[str, Any]
) -> str:
    command = [*start, "-m", f"benchmarks.{module}"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    code, out, written = _finish(command, limit)
    if code is None:
        last = (written.strip().splitlines() or ["nothing"])[-1][:200]
        reason = f"took more than its {limit:.3g} s; it last wrote: {last}"
        raise TookTooLongError(f"{' '.join(command)} {reason}", reason, written)
    if code != 0:
        reason = cause(written) or f"exit code {code}"
        raise ProcessError(f"{' '.join(command)} failed: {reason}", reason, written)
    return out


def cause(stderr: str) -> str:
    """The last exception in what a process wrote, without its traceback; else the end of it all."""
    found = re.finditer(r"^(\[worker \d+\] )?[\w.]+Error: ", stderr, re.M)
    exceptions = [match.start() for match in found]
    return (stderr[exceptions[-1]:][:600] if exceptions else stderr[-600:]).strip()


def _finish(command: list[str], limit: float | None) -> tuple[int | None, str, str]:
    """Returns a command's exit code, or None if it was killed at its limit, stdout and stderr."""
    process = None
    try:
        with _signals_later():
            # It has its own group: Ctrl-C reaches this process alone, which ends the whole group.
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            )
        out, written = process.communicate(timeout=limit)
        return process.returncode, out, written
    except subprocess.TimeoutExpired:
        assert process is not None
        _kill(process)
        return None, *process.communicate()
    finally:
        if process is not None:
            _kill(process)


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _signals_later() -> Iterator[None]:
    """SIGTERM and Ctrl-C wait until the block ends, because within it the child is unknown."""
    arrived: list[int] = []
    numbers = signal.SIGTERM, signal.SIGINT
    handlers = [signal.signal(number, lambda n, frame: arrived.append(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for late in arrived:
            os.kill(os.getpid(), late)
