"""Ends a process that no longer makes progress, and says in which phase it hangs.

main thread    reading data | a train step | a callback | reading data | a train step ...
towers-hang    . . . . . .  one phase lasts too long: a line, all threads' stacks, exit code 4
faulthandler   C code holds Python's lock for too long: all threads' stacks, exit code 1
"""

import faulthandler
import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from towers.machine import files, places
from towers.machine.terminal import STDERR, python_stderr

HUNG = 4  # the exit code of a process that this module has ended
LEAST_SECONDS = 300.0
MOST_SECONDS = 1_000_000  # the system's limit is not much higher


class _Doing(NamedTuple):
    """Holds the main thread's phase; if devices compute in it, a message names the towers."""

    phase: str = "the work between two steps"
    is_patient: bool = False  # it may take any time
    computes: bool = False


class _Now:
    """Holds the phase, the kinds of steps so far, and the number of open `Watch`es."""

    doing = _Doing()  # a new object for each change
    known: set[str] = set()
    watchers = 0


now = _Now()


@contextmanager
def within(phase: str, *, is_patient: bool = False, computes: bool = False) -> Iterator[None]:
    """Inside the context, the main thread is in another phase."""
    before = now.doing
    now.doing = _Doing(phase, is_patient, computes)
    try:
        yield
    finally:
        now.doing = _Doing(*before)  # a new object, because a phase's end is progress, too


@contextmanager
def tracing(phase: str) -> Iterator[None]:
    """Inside the context, the main thread traces: it may take any time. No garbage is collected.

    A trace makes millions of objects that stay, and Python's collector would look at them often.
    """
    if gc.isenabled():
        resume = gc.enable
    else:
        resume = gc.disable
    gc.disable()
    try:
        with within(phase, is_patient=True):
            yield
    finally:
        resume()


@contextmanager
def step(phase: str) -> Iterator[None]:
    """Inside the context, devices compute; the first phase of a kind may take any time."""
    with within(phase, is_patient=phase not in now.known, computes=True):
        yield
    now.known.add(phase)


@dataclass
class Watch:
    """Inside the context, ends the process (`HUNG`) if a phase after the first step is too long.

    towers: a text such as "towers 0-1 on /cpu:0, /cpu:1". remedy: sentences on how to continue.
    seconds: a phase's limit; 0 means none, and None 10 times the longest phase, at least `least`.
    log: the file for the stacks; None means stderr. leave: a function that restores the terminal.
    """

    towers: str
    remedy: str
    seconds: float | None = None
    least: float = LEAST_SECONDS
    log: Path | None = None
    leave: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        def stop(number: int, frame: FrameType | None) -> None:  # as Ctrl-Z does; this is no hang
            faulthandler.cancel_dump_traceback_later()
            os.kill(os.getpid(), signal.SIGSTOP)

        now.known.clear()
        now.doing = _Doing()
        now.watchers += 1
        self._main, self._ended = threading.get_ident(), threading.Event()
        is_free = threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        )
        self._on_stop = signal.signal(signal.SIGTSTP, stop) if is_free else None
        self._thread = threading.Thread(target=self._run, daemon=True, name="towers-hang")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        now.watchers -= 1
        self._ended.set()
        self._thread.join()
        if self._on_stop is not None:
            signal.signal(signal.SIGTSTP, self._on_stop)

    def _run(self) -> None:
        tick = min(1.0, (self.seconds or self.least) / 4)
        doing, looked, waited, longest = now.doing, time.monotonic(), 0.0, 0.0
        while not self._ended.wait(tick):
            before, looked = looked, time.monotonic()
            waited += min(looked - before, 2 * tick)  # Ctrl-Z may have stopped the process
            if now.doing is not doing:
                doing, longest, waited = now.doing, max(longest, waited), 0.0
            if self.seconds is None:
                limit = max(self.least, 10 * longest)
            else:
                limit = self.seconds
            if not now.known or doing.is_patient or limit == 0:
                limit = math.inf
            if waited >= limit and now.doing is doing:
                self._end_process(doing, waited)
            # If C code holds Python's lock, this thread does not come again, and the process ends.
            faulthandler.cancel_dump_traceback_later()
            if limit < math.inf:
                faulthandler.dump_traceback_later(limit + 2, exit=True, file=python_stderr())
        faulthandler.cancel_dump_traceback_later()

    def _end_process(self, doing: _Doing, seconds: float) -> None:
        if doing.computes:
            where = f" ({self.towers})"
        else:
            where = stands_in(self._main)
        stacks = "follow" if self.log is None else f"stand in {self.log}"
        text = places.prefix(places.here()).sub(
            "",
            (
                f"error: it hangs: no progress after {seconds:.0f} seconds in {doing.phase}{where}. "
                f"The stacks of its threads {stacks}. {self.remedy}\n"
            ),
        )

        def write_stacks() -> None:
            if self.log is None:
                faulthandler.dump_traceback(STDERR)
            else:
                file = files.open_to_append(self.log)
                file.write(text.encode(errors="backslashreplace"))
                file.flush()
                faulthandler.dump_traceback(file)

        for act in (
            self.leave,
            lambda: print(text, end="", file=sys.stderr, flush=True),
            write_stacks,
            sys.stdout.flush,
        ):
            thread = threading.Thread(target=act, daemon=True)  # writing may hang, too
            thread.start()
            thread.join(2)
        os._exit(HUNG)


def stands_in(thread: int) -> str:
    """Returns a thread's innermost function, ", in read (source.py, line 31)"; "" if it ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
