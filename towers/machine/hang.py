"""Ends a process that no longer makes progress, and says in which phase it hangs.

    main thread    reading data | a train step | a callback | reading data | a train step ...
    towers-hang    . . . . . .  one phase lasts too long: a line, all threads' stacks, exit code 4
    guard          another process, in case C code holds Python's lock: a line, SIGABRT
"""

import faulthandler
import gc
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from towers.machine import guard, places
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
    resume = gc.enable if gc.isenabled() else gc.disable
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
        now.known.clear()
        now.doing = _Doing()
        now.watchers += 1
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="towers-hang")
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        now.watchers -= 1
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        tick = min(1.0, (self.seconds or self.least) / 4)
        doing, looked, waited, longest = now.doing, time.monotonic(), 0.0, 0.0
        other: subprocess.Popen[bytes] | None = None
        while not self._ended.wait(tick):
            before, looked = looked, time.monotonic()
            waited += min(looked - before, 2 * tick)  # Ctrl-Z may have stopped the process
            if now.doing is not doing:
                doing, longest, waited = now.doing, max(longest, waited), 0.0
            limit = max(self.least, 10 * longest) if self.seconds is None else self.seconds
            if not now.known or doing.is_patient or limit == 0:
                limit = math.inf
            if waited >= limit and now.doing is doing:
                self._end_process(doing, waited)
            with suppress(OSError):  # the guard cannot start, has ended, or no longer reads
                if other is None and limit < math.inf and sys.platform == "linux":
                    other = _start_guard(self.remedy)
                if other is not None and other.stdin is not None:
                    line = f"{limit + 2}\n"  # longer, because the thread says more
                    os.write(other.stdin.fileno(), line.encode())
        if other is not None:
            other.kill()
            other.communicate()

    def _end_process(self, doing: _Doing, seconds: float) -> None:
        where = f" ({self.towers})" if doing.computes else stands_in(self._main)
        stacks = "follow" if self.log is None else f"stand in {self.log}"
        text = places.prefix(places.here()).sub("", (
            f"error: it hangs: no progress after {seconds:.0f} seconds in {doing.phase}{where}. "
            f"The stacks of its threads {stacks}. {self.remedy}\n"
        ))

        def write_stacks() -> None:
            if self.log is None:
                faulthandler.dump_traceback(STDERR)
            else:
                file = self.log.open("a", encoding="utf-8", errors="backslashreplace")
                print(text, end="", file=file, flush=True)
                faulthandler.dump_traceback(file)

        for act in (self.leave, lambda: print(text, end="", file=sys.stderr, flush=True),
                    write_stacks, sys.stdout.flush):
            thread = threading.Thread(target=act, daemon=True)  # writing may hang, too
            thread.start()
            thread.join(2)
        os._exit(HUNG)


def _start_guard(remedy: str) -> "subprocess.Popen[bytes]":
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)  # SIGABRT then shows the stacks
    other = subprocess.Popen(
        [sys.executable, "-IS", guard.__file__, remedy], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=python_stderr(),
        start_new_session=True,  # so that Ctrl-C and Ctrl-Z do not reach it
    )
    os.set_blocking(other.stdin.fileno(), False)  # type: ignore[union-attr]
    return other


def stands_in(thread: int) -> str:
    """Returns a thread's innermost function, ", in read (source.py, line 31)"; "" if it ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return f", in {frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
