"""Child processes that find this package, and that end with the process that started them."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here, not after a fork


def start(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Starts a child that reads nothing and that, on Linux, is killed when this process ends.

    prctl(2) counts the thread that starts the child as its parent: call this in the main thread.

    Args:
        command: the program and its arguments.
        environment: variables to set beside this process's own.
        options: further arguments of `subprocess.Popen`.

    Raises:
        OSError: the child cannot be started.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        command,
        env={
            **os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))
        },
        stdin=subprocess.DEVNULL,
        preexec_fn=partial(_end_with, os.getpid()),
        **options,
    )


def outcome(code: int) -> str:
    """"ended with exit code 1", or "was killed by SIGTERM": from `subprocess.Popen.returncode`."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (is there too little memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def _end_with(parent: int) -> None:
    """Lets the system kill this process when its parent ends; it lasts beyond `exec`."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent has ended already
            os.kill(os.getpid(), signal.SIGKILL)
