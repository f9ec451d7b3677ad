"""Ends a process that no longer makes progress, and says in which phase it hangs.

    main thread    reading data | a train step | a callback | reading data | a train step ...
    towers-hang    . . . . . .  one phase lasts too long: a line, all threads' stacks, exit code 4

The hanging thread cannot be interrupted, because it may wait forever. If C code holds Python's
lock, no thread can end the process, so another process (`guard`) does.
"""

import faulthandler
import math
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from towers.machine import guard, places

HUNG = 4  # the exit code of a process that this module has ended
READING, BETWEEN = "reading data", "the work between two steps"
LEAST_SECONDS = 300.0
MOST_SECONDS = 1_000_000  # the system's limit is not much higher
_TIMES_THE_LONGEST = 10
_TICK = 1.0  # seconds
_SECONDS_TO_SAY = 2.0  # for each write, because writing may hang, too
_SECONDS_BEHIND = 2.0  # the guard waits longer than the thread, because the thread says more
_STDERR = 2


class _Doing(NamedTuple):
    """Describes the main thread's phase.

    is_patient: whether the phase may take any time. computes: whether devices work in it.
    """

    phase: str = BETWEEN
    is_patient: bool = False
    computes: bool = False


class _Now:
    """Holds the current phase. A step has many phases, so a change is one attribute assignment.

    doing: the phase, a new object for each change. known: the kinds of steps so far; the first
    step of each kind is traced and compiled. watchers: the number of open `Watch`es.
    """

    doing = _Doing()
    known: set[str] = set()
    watchers = 0


now = _Now()


@contextmanager
def within(phase: str, *, is_patient: bool = False, computes: bool = False) -> Iterator[None]:
    """Sets the phase inside the context, and the previous phase after it.

    Args:
        phase: the text that follows "in" in a message.
        is_patient: whether the phase may take any time.
        computes: whether devices work in it; if it hangs, the message names the towers.
    """
    before = now.doing
    now.doing = _Doing(phase, is_patient, computes)
    try:
        yield
    finally:
        now.doing = _Doing(*before)  # a new object, because a phase's end is progress, too


@contextmanager
def step(phase: str) -> Iterator[None]:
    """Sets a phase in which devices compute; the first one of a kind may take any time."""
    with within(phase, is_patient=phase not in now.known, computes=True):
        yield
    now.known.add(phase)


@dataclass
class Watch:
    """Inside the context, ends the process (`HUNG`) if a phase after the first step is too long.

    towers: a text such as "towers 0-1 on /cpu:0, /cpu:1".
    remedy: sentences that tell the user how to continue.
    seconds: a phase's limit; None means 10 times the longest phase so far, 0 means no limit.
    least: the smallest limit if `seconds` is None.
    log: the file for the stacks; None means stderr.
    leave: a function that restores the terminal.
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
        """Watches the main thread, and ends the process if it hangs."""
        tick = min(_TICK, (self.seconds or self.least) / 4)
        doing, looked, waited, longest = now.doing, time.monotonic(), 0.0, 0.0
        other: subprocess.Popen[bytes] | None = None
        while not self._ended.wait(tick):
            before, looked = looked, time.monotonic()
            waited += min(looked - before, 2 * tick)  # Ctrl-Z may have stopped the process
            if now.doing is not doing:
                doing, longest, waited = now.doing, max(longest, waited), 0.0
            limit = self.seconds
            if limit is None:
                limit = max(self.least, _TIMES_THE_LONGEST * longest)
            if not now.known or doing.is_patient or limit == 0:
                limit = math.inf
            if waited >= limit and now.doing is doing:
                self._end_process(doing, waited)
            if other is None and limit < math.inf:
                other = guard.start(self.remedy)
            if other is not None and other.stdin is not None:
                with suppress(OSError):  # the guard has ended, or no longer reads
                    os.write(other.stdin.fileno(), f"{limit + _SECONDS_BEHIND}\n".encode())
        if other is not None:
            other.kill()
            other.communicate()

    def _end_process(self, doing: _Doing, seconds: float) -> None:
        """Writes the phase and the stacks in threads, because writing may hang, too; then exits."""
        where = f" ({self.towers})" if doing.computes else stands_in(self._main)
        stacks = "follow" if self.log is None else f"stand in {self.log}"
        text = places.prefix(places.here()).sub("", (
            f"error: it hangs: no progress after {seconds:.0f} seconds in {doing.phase}{where}. "
            f"The stacks of its threads {stacks}. {self.remedy}\n"
        ))

        def write_stacks() -> None:
            if self.log is None:
                faulthandler.dump_traceback(_STDERR)
                return
            with self.log.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                faulthandler.dump_traceback(file)

        for act in (self.leave, lambda: print(text, end="", file=sys.stderr, flush=True),
                    write_stacks, sys.stdout.flush):
            thread = threading.Thread(target=act, daemon=True, name="towers-hang-says")
            thread.start()
            thread.join(_SECONDS_TO_SAY)
        os._exit(HUNG)


def stands_in(thread: int) -> str:
    """Returns a thread's innermost function, ", in read (source.py, line 31)"; "" if it ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f", in {innermost.name} ({innermost.filename}, line {innermost.lineno})"
