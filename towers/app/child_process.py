"""Starts child processes that can import this package and end when their parent ends."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here, not after a fork


def start(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a child with an empty stdin. On Linux, the child is killed when this process ends.

    Call this in the main thread: prctl(2) counts the thread that starts the child as its parent.

    environment: variables to set in addition. options: further arguments for `subprocess.Popen`.
    """
    parent = os.getpid()

    def end_with_parent() -> None:  # the setting survives `exec`
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the parent has ended already
                os.kill(os.getpid(), signal.SIGKILL)

    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent, **options
    )


def run(command: Sequence[str]) -> str | None:
    """Runs a child without its output; returns None, or the last error that explains a failure."""
    process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        stderr = process.communicate()[1].decode(errors="replace")
    finally:
        process.kill()  # if Ctrl-C has come
        process.wait()
    if process.returncode == 0:
        return None
    said = [f"the run {outcome(process.returncode)}"]
    if process.returncode > 0:
        said += [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
    return (errors or said)[-1]


def outcome(code: int) -> str:
    """Describes a `Popen.returncode`: "ended with exit code 1" or "was killed by SIGTERM"."""
    if code >= 0:
        return f"ended with exit code {code}"
    text = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        text += " (is there too little memory?)"
    return text
