"""A process that ends with the one that started it, even where SIGKILL ended that one."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here, not after a fork


def end_with(parent: int) -> None:
    """From now on the system sends this process SIGKILL when its parent ends.

    prctl(2) counts the thread that started this process as its parent: let it be the main one. It
    lasts beyond `exec`. Only Linux knows it; elsewhere this does nothing.

    Args:
        parent: the parent's process id; where it has ended already, this process ends here.
    """
    if LIBC is None:
        return
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
