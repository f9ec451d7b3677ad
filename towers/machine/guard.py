"""Ends a process whose Python stands still: a separate program, without towers or TensorFlow.

    towers-hang, a thread    a line a second: "SECONDS TEXT"
    this process             no line for as many seconds: TEXT on stderr, SIGABRT to its parent

A thread cannot do this, because it needs Python's lock. A timer within the process would also
count the time for which the process is stopped, such as by Ctrl-Z.
"""

import math
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_TICK = 1.0  # seconds


def start() -> "subprocess.Popen[bytes] | None":
    """Starts the guard of this process; None where there can be none."""
    if not sys.platform.startswith("linux") or not sys.executable:
        return None  # elsewhere a process that was stopped cannot be told from one that hangs
    stderr = None
    with suppress(AttributeError, OSError, ValueError):  # closed, or a notebook's
        stderr = sys.stderr.fileno()
    with suppress(OSError):
        started = subprocess.Popen(
            [sys.executable, "-IS", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=stderr, start_new_session=True,  # Ctrl-C and Ctrl-Z are not for it
        )
        assert started.stdin is not None
        os.set_blocking(started.stdin.fileno(), False)
        return started
    return None


def main() -> None:
    """Reads lines on stdin until they end."""
    watched, limit, waited, text = os.getppid(), math.inf, 0.0, ""
    while os.getppid() == watched:
        if select.select([0], [], [], _TICK)[0]:
            lines = os.read(0, 1 << 16).decode(errors="replace").splitlines()
            if not lines:
                return
            seconds, _, text = lines[-1].partition(" ")
            limit, waited = float(seconds), 0.0
        elif not _is_stopped(watched):
            waited += _TICK
            if waited > limit:
                os.write(2, f"{text}\n".encode())
                os.kill(watched, signal.SIGABRT)
                return


def _is_stopped(process: int) -> bool:
    """Whether a signal or a debugger has stopped a process (Linux)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


if __name__ == "__main__":
    main()
