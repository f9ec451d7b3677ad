"""Runs one measurement in a fresh process, which never outlives the process that started it.

    python -m benchmarks.process contender.measure '{"contender": "fit", "workload": "cnn"}'

calls `measure` of benchmarks/contender.py with these arguments, and prints its result as JSON.
"""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class ProcessError(RuntimeError):
    """A process failed.

    reason: its last exception, or the end of its output.
    written: its complete stderr.
    """

    def __init__(self, message: str, reason: str, written: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.written = written


class TimeLimitError(ProcessError):
    """A process was killed at its time limit."""


def run_process(
    function: str,
    *,
    num_workers: int = 1,
    limit: float | None = None,
    python: str = sys.executable,
    **arguments: Any,
) -> dict[str, Any]:
    """Calls a function of this package in a fresh process and returns its result.

    Args:
        function: "module.function".
        num_workers: number of processes that train together. The result is the chief's.
        limit: seconds after which the process is killed; None for no limit.
        python: the interpreter of a single process.
        arguments: keyword arguments of the function. JSON must be able to hold them.

    Raises:
        TimeLimitError: The process was killed at its limit.
        ProcessError: The process failed.
    """
    if num_workers > 1:
        return run_workers(function, num_workers, limit=limit, **arguments)[0]
    return json.loads(_output([python], function, limit, arguments).splitlines()[-1])


def run_workers(
    function: str, num_workers: int, *, limit: float | None = None, **arguments: Any
) -> list[dict[str, Any]]:
    """Calls a function in `num_workers` connected processes; returns their results in order."""
    launcher = [sys.executable, "-m", "towers.app.launch", f"--workers={num_workers}"]
    out = _output([*launcher, "--max_restarts=0", "--"], function, limit, arguments)
    found = re.findall(r"^(?:\[worker (\d+)\] )?(\{.*\})$", out, re.M)
    return [json.loads(text) for _, text in sorted(found, key=lambda line: int(line[0] or 0))]


def _output(
    start: Sequence[str], function: str, limit: float | None, arguments: Mapping[str, Any]
) -> str:
    command = [*start, "-m", "benchmarks.process", function, json.dumps(arguments)]
    code, out, written = _finish(command, limit)
    if code is None:
        last = (written.strip().splitlines() or ["nothing"])[-1][:200]
        reason = f"took more than its {limit:.3g} s; it last wrote: {last}"
        raise TimeLimitError(f"{' '.join(command)} {reason}", reason, written)
    if code != 0:
        reason = last_exception(written) or f"exit code {code}"
        raise ProcessError(f"{' '.join(command)} failed: {reason}", reason, written)
    return out


def last_exception(stderr: str) -> str:
    """Returns the last exception that a process wrote, without its traceback, or the last lines."""
    found = re.finditer(r"^(\[worker \d+\] )?[\w.]+Error: ", stderr, re.M)
    exceptions = [match.start() for match in found]
    return (stderr[exceptions[-1] :][:600] if exceptions else stderr[-600:]).strip()


def _finish(command: list[str], limit: float | None) -> tuple[int | None, str, str]:
    """Returns (exit code, stdout, stderr); the exit code is None if the limit was reached."""
    process = None
    try:
        with _delayed_signals():
            # In its own group, Ctrl-C does not reach the child. `_kill` ends the whole group.
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
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
def _delayed_signals() -> Iterator[None]:
    """Delays SIGTERM and Ctrl-C until the block ends, when the new child can be killed."""
    arrived: list[int] = []
    numbers: list[int] = [signal.SIGTERM, signal.SIGINT]
    handlers = [signal.signal(number, lambda n, frame: arrived.append(n)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        for number in arrived:
            os.kill(os.getpid(), number)


def main() -> None:
    """Calls the function that the command line names and prints its result as JSON."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported: errors only
    module, _, name = sys.argv[1].partition(".")
    function = getattr(importlib.import_module(f"benchmarks.{module}"), name)
    print(json.dumps(function(**json.loads(sys.argv[2]))), flush=True)
    if "TF_CONFIG" in os.environ:
        time.sleep(1)  # the other workers may still be receiving what this one sent last
    os._exit(0)  # skips TensorFlow's slow shutdown


if __name__ == "__main__":
    main()
