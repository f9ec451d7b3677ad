"""Ends a process whose Python interpreter hangs; a program without towers or TensorFlow.

    towers-hang, a thread    sends a line a second: the seconds that may pass without another line
    this process             after these seconds, writes an error and sends SIGABRT to its parent

A thread cannot do this, because it needs Python's lock. `faulthandler.dump_traceback_later` would
also count the time for which the process is stopped, such as by Ctrl-Z.
"""

import faulthandler
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def start(remedy: str) -> "subprocess.Popen[bytes] | None":
    """Starts the guard of this process; returns None if that is not possible.

    Args:
        remedy: sentences that tell the user how to continue.
    """
    if not sys.platform.startswith("linux") or not sys.executable:
        return None  # elsewhere, a stopped process looks like one that hangs
    if not faulthandler.is_enabled():
        faulthandler.enable(2)
    stderr = None
    with suppress(AttributeError, OSError, ValueError):  # closed, or a notebook's
        stderr = sys.stderr.fileno()
    with suppress(OSError):
        started = subprocess.Popen(
            [sys.executable, "-IS", __file__, remedy], stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=stderr,
            start_new_session=True,  # so that Ctrl-C and Ctrl-Z do not reach it
        )
        assert started.stdin is not None
        os.set_blocking(started.stdin.fileno(), False)
        return started
    return None


def main(remedy: str) -> None:
    """Reads time limits from stdin until it ends; ends the parent if no line comes in time."""
    watched, limit, waited = os.getppid(), float("inf"), 0
    while os.getppid() == watched:
        if select.select([0], [], [], 1)[0]:
            lines = os.read(0, 1 << 16).split()
            if not lines:
                return
            limit, waited = float(lines[-1]), 0
        elif Path(f"/proc/{watched}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
            waited += 1
            if waited > limit:
                os.write(2, (
                    "error: it hangs: a function in C holds Python's lock. The stacks of its "
                    f"threads follow. {remedy}\n"
                ).encode())
                os.kill(watched, signal.SIGABRT)
                return


if __name__ == "__main__":
    main(sys.argv[1])
