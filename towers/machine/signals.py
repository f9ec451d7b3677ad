"""Ctrl-C, SIGTERM and SIGHUP end a run between two steps, never within one; SIGUSR1 ends none.

A second one ends the process at once. A notebook's kernel holds more than the run: a second Ctrl-C
there ends the cell at once.

A forked child is no part of the run: signals do to it what they did before they were deferred.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from towers.machine import hang

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDERR = 2  # leads to a run's log.txt while it trains
_replaced: list[dict[int, Any]] = []  # the handlers that each open `handled_by` puts back
_forking = threading.local()  # `mask`: the signals that the thread blocked before its fork


class Pending:
    """The signal that has come and still waits to be obeyed."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._waits = True

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remembers the first one; the second ends the process at once, like an uncaught one.

        SIGHUP is never the second: of one closed terminal, the shell and the system both tell.

        Raises:
            KeyboardInterrupt: the second is SIGINT, and a person is at Python's prompt.
            StopRequested: the first has come within `at_once`.
        """
        del frame
        if self.number is None:
            self.number = number
            if not self._waits:
                raise StopRequested
        elif number == signal.SIGINT and hasattr(sys, "ps1"):  # a notebook has a prompt, too
            raise KeyboardInterrupt
        elif number != signal.SIGHUP:
            os._exit(128 + number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Within, the signal is obeyed as it comes: nothing is there that would have to be saved.

        Raises:
            StopRequested: a signal has come.
        """
        self._waits = False
        try:
            self.obey(self.number or 0)
            yield
        finally:
            self._waits = True

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
    stopped = False
    with handled_by(pending.receive):
        try:
            yield pending
        except StopRequested:
            stopped = True
    if pending.number is not None:
        try:
            signal.raise_signal(pending.number)
        except BaseException as error:
            raise error from None  # a traceback without StopRequested's
    if stopped:  # a handler of the user's has returned
        raise KeyboardInterrupt from None


@contextmanager
def handled_by(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, the signals that end a run call `receive`; those that are ignored stay ignored."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in not_ignored()}
    _replaced.append(dict(before))
    for number in before:
        signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if _replaced:  # in a child they have been put back
            _replaced.pop()


def not_ignored() -> list[signal.Signals]:
    """The signals that end a run; without those that are ignored, as SIGHUP is under nohup."""
    return [n for n in _STOPS if signal.getsignal(n) not in (None, signal.SIG_IGN)]


def show_stacks_on_request() -> None:
    """From now on SIGUSR1 writes all threads' stacks to stderr, instead of ending the process.

    The main thread's own comes at once, even from within C; all of them with Python's lock alone:
    without it other threads change their stacks meanwhile, which ends the process. A handler of
    somebody else's stays.
    """
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _show_stacks)
        faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=False, chain=True)


def _show_stacks(number: int, frame: FrameType | None) -> None:
    """Writes the phase and the stacks to where a run's log is, else to Python's own stderr."""
    file = _STDERR
    if not hang.now.watchers:  # before there is a log.txt, `_STDERR` may lead nowhere
        with suppress(AttributeError, OSError, ValueError):  # closed, or a notebook's
            file = sys.stderr.fileno()
    os.write(file, f"SIGUSR1 in {hang.now.doing.phase}\n".encode())
    faulthandler.dump_traceback(file)


def _before_fork() -> None:
    """Blocks signals: one sent to the child waits until the child has its handlers."""
    if _replaced:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _after_fork_in_parent() -> None:
    """Lets signals through that were let through before."""
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Puts back the handlers that the run has replaced, the outermost at last."""
    while _replaced:
        for number, handler in _replaced.pop().items():
            signal.signal(number, handler)
    _after_fork_in_parent()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
