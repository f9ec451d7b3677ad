"""Ends a process that no longer makes progress, and says in which phase it hangs.

    main thread    reading data | a train step | a callback | reading data | a train step ...
    towers-hang    . . . . . .  one phase lasts too long: a line, all threads' stacks, exit code 4

The thread that hangs cannot be unwound: what it waits for may never come. If C code holds Python's
lock, no thread can end the process: `guard`, another process, does it.
"""

import faulthandler
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from towers.machine import guard, places, signals

HUNG = 4  # the exit code of a process that has ended itself so
READING, BETWEEN = "reading data", "the work between two steps"
LEAST_SECONDS = 300.0
MOST_SECONDS = 1_000_000  # the system's own limit is not much above
_TIMES_THE_LONGEST = 10
_TICK = 1.0  # seconds
_SECONDS_TO_SAY = 2.0  # what it writes to may hang, too
_SECONDS_BEHIND = 2.0  # the guard waits longer than the thread, which says more
_STDERR = 2
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd")  # one that waits for its user hangs nowhere


class Watched(NamedTuple):
    """A run, as its watch needs to know it.

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


class _Now:
    """What the main thread does: a few stores for each phase, as a step has many.

    count: of phases so far. is_patient: the phase may take any time. computes: the devices work.
    known: the kinds of steps that have been made: the first of each is traced and compiled.
    """

    phase, count, is_patient, computes = BETWEEN, 0, False, False
    known: set[str] = set()
    watchers = 0


def enter(phase: str) -> None:
    """From now on the process is in another phase."""
    _Now.phase = phase
    _Now.count += 1


@contextmanager
def within(phase: str, *, is_patient: bool = False, computes: bool = False) -> Iterator[None]:
    """A phase inside of another one.

    Args:
        phase: what a person reads behind "in".
        is_patient: whether it may take any time.
        computes: whether it hangs where a device does.
    """
    before = _Now.phase, _Now.is_patient, _Now.computes
    _Now.is_patient, _Now.computes = is_patient, computes
    enter(phase)
    try:
        yield
    finally:
        phase, _Now.is_patient, _Now.computes = before
        enter(phase)


@contextmanager
def step(phase: str) -> Iterator[None]:
    """The phase in which devices compute; the first of a kind takes any time."""
    with within(phase, is_patient=phase not in _Now.known, computes=True):
        yield
    _Now.known.add(phase)


@contextmanager
def watching(watched: Watched) -> Iterator[None]:
    """Within, and after the first step, a phase that lasts too long ends the process with `HUNG`.

    SIGUSR1 shows the phase, beside the stacks.
    """
    _Now.known.clear()
    enter(BETWEEN)
    watcher = _Watcher(watched)
    _Now.watchers += 1
    try:
        yield
    finally:
        _Now.watchers -= 1
        watcher.end()


def is_watching() -> bool:
    """Whether a run or a fit is watched."""
    return _Now.watchers > 0


def stands_in(thread: int) -> str:
    """", in read (source.py, line 31)": the innermost function of a thread; "" where it ended."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f", in {innermost.name} ({innermost.filename}, line {innermost.lineno})"


class _Watcher:
    """The thread that looks at the main one."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._prefix = places.prefix(places.here())
        self._main = threading.get_ident()
        self._waited = 0.0  # seconds of this phase in which the process was not stopped
        self._longest = 0.0  # seconds of a phase that is over
        self._ears, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        self._hears = threading.current_thread() is threading.main_thread() and self._listen()
        self._has_ended = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="towers-hang")
        self._thread.start()

    def end(self) -> None:
        """Returns never, where the process is being ended."""
        if self._hears:
            signals.Stacks.heard = False
            signal.set_wakeup_fd(-1)
        self._has_ended = True
        os.write(self._mouth, b"\0")
        self._thread.join()
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
        os.close(self._ears)
        os.close(self._mouth)

    def _listen(self) -> bool:
        """Whether this thread hears of signals, even while the main one is in C."""
        signals.show_stacks_on_request()
        before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        if before != -1:  # an event loop's, as in a notebook
            signal.set_wakeup_fd(before)
        signals.Stacks.heard = before == -1
        return signals.Stacks.heard

    def _run(self) -> None:
        tick = min(_TICK, (self._watched.seconds or self._watched.least) / 4)
        count, looked = _Now.count, time.monotonic()
        while True:
            heard = self._wait(tick)
            if self._has_ended:
                return
            before, looked = looked, time.monotonic()
            # A process that was stopped, as by Ctrl-Z, did not hang meanwhile.
            self._waited += min(looked - before, 2 * tick)
            if _Now.count != count:
                count, self._longest = _Now.count, max(self._longest, self._waited)
                self._waited = 0.0
            if signal.SIGUSR1 in heard:
                _say(self._show)
            if self._hangs() and _Now.count == count:
                self._end_process()
            self._tell_guard()

    def _show(self) -> None:
        os.write(_STDERR, f"SIGUSR1 {self._where()}\n".encode())
        signals.show_stacks()

    def _wait(self, seconds: float) -> bytes:
        """The signals that came in this time."""
        ready, _, _ = select.select([self._ears], [], [], seconds)
        return os.read(self._ears, 4096) if ready else b""

    def _hangs(self) -> bool:
        if not _Now.known or _Now.is_patient or self._waited < self._limit():
            return False
        if _is_debugged(sys._current_frames().get(self._main)):
            self._waited = 0.0
        return self._waited > 0

    def _tell_guard(self) -> None:
        """Tells the guard that Python runs, and how long it may stand still from now on."""
        limit = self._limit() if _Now.known and not _Now.is_patient else math.inf
        if self._guard is None and math.isfinite(limit):
            if not faulthandler.is_enabled():
                faulthandler.enable(_STDERR)
            self._guard = guard.start()
        if self._guard is not None and self._guard.stdin is not None:
            text = self._prefix.sub("", (
                f"error: it hangs: a function in C has held Python's lock for {limit:.0f} seconds. "
                f"The stacks of its threads follow. {self._watched.way_out}"
            ))
            with suppress(OSError):  # it has ended, or reads no more
                line = f"{limit + _SECONDS_BEHIND} {' '.join(text.split())}\n"
                os.write(self._guard.stdin.fileno(), line.encode())

    def _limit(self) -> float:
        seconds = self._watched.seconds
        if seconds is None:
            return max(self._watched.least, _TIMES_THE_LONGEST * self._longest)
        return seconds or math.inf

    def _where(self) -> str:
        """"after 12 seconds in reading data, in read (source.py, line 31)"."""
        towers = f" ({self._watched.towers})" if _Now.computes else stands_in(self._main)
        return self._prefix.sub("", f"after {self._waited:.0f} seconds in {_Now.phase}{towers}")

    def _end_process(self) -> None:
        log = self._watched.log
        stacks = "follow" if log is None else f"stand in {log}"
        text = self._prefix.sub("", (
            f"error: it hangs: no progress {self._where()}. The stacks of its threads {stacks}. "
            f"{self._watched.way_out}\n"
        ))
        _say(self._watched.leave)
        _say(lambda: print(text, end="", file=sys.stderr, flush=True))
        _say(lambda: _write_stacks(log, text))
        _say(lambda: print(end="", flush=True))
        os._exit(HUNG)


def _write_stacks(log: Path | None, text: str) -> None:
    if log is None:
        faulthandler.dump_traceback(_STDERR)
        return
    with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
        file.flush()
        faulthandler.dump_traceback(file)


def _say(what: Callable[[], object]) -> None:
    """Does it in a thread of its own, and goes on without it where that takes too long."""
    def do() -> None:
        with suppress(Exception):
            what()

    thread = threading.Thread(target=do, daemon=True, name="towers-hang-says")
    thread.start()
    thread.join(_SECONDS_TO_SAY)


def _is_debugged(frame: FrameType | None) -> bool:
    """Whether a debugger holds the thread of this frame."""
    return frame is not None and any(
        str(inner.f_globals.get("__name__")).startswith(_DEBUGGERS)
        for inner, _ in traceback.walk_stack(frame)
    )
