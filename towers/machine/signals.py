"""Ctrl-C, SIGTERM and SIGHUP end a run between two steps, never within one; SIGUSR1 ends none."""

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2  # leads to a run's log.txt while it trains


class Pending:
    """The signal that has come and still waits to be obeyed."""

    def __init__(self) -> None:
        self.number: int | None = None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remembers the first one; the second ends the process at once, like an uncaught one.

        SIGHUP is never the second: of one closed terminal, the shell and the system both tell.
        """
        del frame
        if self.number is None:
            self.number = number
        elif number != signal.SIGHUP:
            os._exit(128 + number)

    def obey(self, agreed: int) -> None:
        """Raises StopRequested for the signal that all workers of a run obey now; 0: for none.

        One that has come to this worker since they agreed waits until all know of it.
        """
        if agreed:
            self.number = agreed
            raise StopRequested


class StopRequested(BaseException):
    """A signal has come, and no step is under way."""


@contextmanager
def deferred() -> Iterator[Pending]:
    """Signals wait until `Pending.obey`; those that came are sent again at the end.

    Only the main thread receives signals; in others this does nothing. SIGUSR1 shows the stacks.
    """
    pending = Pending()
    if threading.current_thread() is not threading.main_thread():
        yield pending
        return
    show_stacks_on_request()
    before = {number: signal.getsignal(number) for number in not_ignored()}
    for number in before:
        signal.signal(number, pending.receive)
    stopped = False
    try:
        yield pending
    except StopRequested:
        stopped = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pending.number is not None:
        signal.raise_signal(pending.number)
    if stopped:  # a handler of the user's has returned
        raise KeyboardInterrupt


def not_ignored() -> list[signal.Signals]:
    """The signals that end a run; without those that are ignored, as SIGHUP is under nohup."""
    return [n for n in _STOPS if signal.getsignal(n) not in (None, signal.SIG_IGN)]


def show_stacks_on_request() -> None:
    """From now on SIGUSR1 writes all threads' stacks to stderr, instead of ending the process.

    A handler of somebody else's stays.
    """
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, file=_STDERR)
