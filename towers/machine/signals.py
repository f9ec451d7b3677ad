"""Makes Ctrl-C, SIGTERM and SIGHUP end a run between two steps; SIGUSR1 shows the stacks.

A second signal ends the process, or the notebook's cell, at once. A forked child does not belong to
the run: signals act on it as before they were deferred.
"""

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

from towers.machine import hang
from towers.machine.terminal import STDERR, python_stderr

# A signal's handler, as `signal.getsignal` returns it.
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_replaced: list[dict[int, _Handler]] = []  # the handlers that each open `handled_by` restores
_forking = threading.local()  # `mask`: the signals that the thread blocked before its fork


class Pending:
    """Holds the signal that has come and is not yet obeyed."""

    number: int | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        """Keeps the first signal; the second one ends the process at once, as if uncaught."""
        if self.number is None:
            self.number = number
        elif number == signal.SIGINT and hasattr(sys, "ps1"):  # a notebook has a prompt, too
            raise KeyboardInterrupt
        elif number != signal.SIGHUP:  # for one closed terminal, shell and system both send it
            os._exit(128 + number)

    def obey(self, agreed: int) -> None:
        """Raises StopRequested for the signal that all workers agreed to obey, unless it is 0."""
        if agreed:
            self.number = agreed
            raise StopRequested


class StopRequested(BaseException):
    """A signal has come, and no step is running."""


@contextmanager
def deferred() -> Iterator[Pending]:
    """Inside the context, signals wait for `Pending.obey`; at its end, they are sent again.

    Only the main thread receives signals; elsewhere, this does nothing. SIGUSR1 shows the stacks.
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
            raise error from None  # leaves StopRequested out of the traceback
    if stopped:  # the user's handler has returned
        raise KeyboardInterrupt from None


@contextmanager
def handled_by(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the context, signals that end a run call `receive`; ignored ones stay ignored."""
    before: dict[int, _Handler] = {number: signal.getsignal(number) for number in _STOPS}
    before = {n: handler for n, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    _replaced.append(before)
    for number in before:
        signal.signal(number, receive)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if _replaced:  # a forked child has restored them already
            _replaced.pop()


def show_stacks_on_request() -> None:
    """Makes SIGUSR1 write all threads' stacks to stderr, instead of ending the process.

    The main thread's stack is written at once, even from C code. The others need Python's lock,
    because threads change their stacks. A handler that is already installed stays.
    """
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _show_stacks)
        faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=False, chain=True)


def _show_stacks(number: int, frame: FrameType | None) -> None:
    """Writes the phase and the stacks to a run's log, or to Python's stderr without a run."""
    # Before there is a log.txt, `STDERR` may lead nowhere.
    file = STDERR if hang.now.watchers else python_stderr()
    os.write(file, f"SIGUSR1 in {hang.now.doing.phase}\n".encode())
    faulthandler.dump_traceback(file)


def _before_fork() -> None:
    """Blocks signals, so that a signal to the child waits until the child has its handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS if _replaced else ())


def _after_fork() -> None:
    """Restores the signals that were blocked."""
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    """Restores the handlers that the run has replaced, the outermost ones last."""
    while _replaced:
        for number, handler in _replaced.pop().items():
            signal.signal(number, handler)
    _after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
