"""Ends a process that no longer makes progress, and says in which phase it hangs.

    main thread    reading data | a train step | a callback | reading data | a train step ...
    towers-hang    . . . . . .  one phase lasts too long: a line, all threads' stacks, exit code 4

The thread that hangs cannot be unwound: what it waits for may never come. If C code holds Python's
lock, no thread can end the process: `guard`, another process, does it.
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

HUNG = 4  # the exit code of a process that has ended itself so
READING, BETWEEN = "reading data", "the work between two steps"
LEAST_SECONDS = 300.0
MOST_SECONDS = 1_000_000  # the system's own limit is not much above
_TIMES_THE_LONGEST = 10
_TICK = 1.0  # seconds
_SECONDS_TO_SAY = 2.0  # what it writes to may hang, too
_SECONDS_BEHIND = 2.0  # the guard waits longer than the thread, which says more
_STDERR = 2


class _Doing(NamedTuple):
    """What the main thread does.

    is_patient: it may take any time. computes: the devices work.
    """

    phase: str = BETWEEN
    is_patient: bool = False
    computes: bool = False


class _Now:
    """What the process does now: one store for each phase, as a step has many.

    doing: another object with each phase. known: the kinds of steps that have been made: the first
    of each is traced and compiled. watchers: how many `Watch`es are open.
    """

    doing = _Doing()
    known: set[str] = set()
    watchers = 0


now = _Now()


@contextmanager
def within(phase: str, *, is_patient: bool = False, computes: bool = False) -> Iterator[None]:
    """A phase inside of another one.

    Args:
        phase: what a person reads behind "in".
        is_patient: whether it may take any time.
        computes: whether it hangs where a device does.
    """
    before = now.doing
    now.doing = _Doing(phase, is_patient, computes)
    try:
        yield
    finally:
        now.doing = _Doing(*before)  # a new one: this is progress, too


@contextmanager
def step(phase: str) -> Iterator[None]:
    """The phase in which devices compute; the first of a kind takes any time."""
    with within(phase, is_patient=phase not in now.known, computes=True):
        yield
    now.known.add(phase)


@dataclass
class Watch:
    """Within, and after the first step, a phase that lasts too long ends the process (`HUNG`).

    towers: "towers 0-1 on /cpu:0, /cpu:1".
    way_out: sentences on how to go on.
    seconds: after which a phase hangs; None: 10 times the longest one so far; 0: none does.
    least: what these 10 times are at least.
    log: the file for the stacks; None: stderr.
    leave: makes the terminal what it was.
    """

    towers: str
    way_out: str
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
        """Looks at the main thread, and ends the process if it hangs."""
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
                other = guard.start(self.way_out)
            if other is not None and other.stdin is not None:
                with suppress(OSError):  # it has ended, or reads no more
                    os.write(other.stdin.fileno(), f"{limit + _SECONDS_BEHIND}\n".encode())
        if other is not None:
            other.kill()
            other.communicate()

    def _end_process(self, doing: _Doing, seconds: float) -> None:
        """Writes the phase and the stacks; what it writes to may hang, too."""
        where = f" ({self.towers})" if doing.computes else stands_in(self._main)
        stacks = "follow" if self.log is None else f"stand in {self.log}"
        text = places.prefix(places.here()).sub("", (
            f"error: it hangs: no progress after {seconds:.0f} seconds in {doing.phase}{where}. "
            f"The stacks of its threads {stacks}. {self.way_out}\n"
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
    """", in read (source.py, line 31)": the innermost function of a thread; "" where it ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f", in {innermost.name} ({innermost.filename}, line {innermost.lineno})"
