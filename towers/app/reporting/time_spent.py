"""Adds up where the time of a run goes, in all of its processes.

start and end, first step, steps, repeated steps, data, validation, checkpoints, files and callbacks
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from towers.machine import files
from towers.resume import directories

FILE = "time.json"  # in checkpoints/
START, FIRST, STEPS, REPEATED = "start and end", "first step", "steps", "repeated steps"
DATA, VALIDATION, CHECKPOINTS = "data", "validation", "checkpoints"
CALLBACKS = "files and callbacks"
PARTS = (STEPS, REPEATED, FIRST, DATA, VALIDATION, CHECKPOINTS, CALLBACKS, START)
_SIZE = 1024  # bytes of the file: a single write, which a kill cannot interrupt
_SHORTEST, _LONGEST, _SHARE = 0.02, 10.0, 200  # seconds between two writes; of the process's time

T = TypeVar("T")


def process_seconds() -> float:
    """Returns the age of this process in seconds; 0.0 on a system that does not tell it."""
    with suppress(OSError, AttributeError):
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        )
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


class TimeSpent:
    """Counts the seconds of each part of a run. The parts add up to the time of its processes.

    A process that is killed cannot write, so a thread writes all seconds from time to time: every
    0.02 seconds at first, then after each 0.5% of the process's time, and at least every 10 seconds.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        """seconds: the time that this process has already spent on the run; it counts as START."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.num_starts = 1
        self._part, self._since = START, time.perf_counter() - seconds
        self._began = self._since
        self._step = self._repeats_to = 0  # the last step made, and the last of earlier processes
        self._is_first = True
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Counts the time of the context as `part`, except for contexts inside of it."""
        outer = self._switch(part)
        try:
            yield
        finally:
            self._switch(outer)

    @contextmanager
    def in_step(self, step: int) -> Iterator[None]:
        """Counts the time of the step with this number; the first step has number 1."""
        part = STEPS
        if self._is_first:
            part = FIRST
        elif step <= self._repeats_to:
            part = REPEATED
        with self.within(part):
            yield
        self._is_first, self._step = False, max(step, self._step)

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches, and counts the wait for each as DATA."""
        iterator = iter(batches)
        while True:
            with self.within(DATA):
                batch = next(iterator, None)
            if batch is None:
                return
            yield batch

    def _switch(self, part: str | None = None) -> str:
        """Counts the time until now, then begins another part. Returns the part before."""
        with self._lock:
            now, before = time.perf_counter(), self._part
            self.seconds[before] += now - self._since
            self._part, self._since = part or before, now
        return before

    @contextmanager
    def kept_in(self, directory: Path, warn: Callable[[str], None]) -> Iterator[None]:
        """Adds the time of earlier processes, and writes the sum in a thread until the end."""
        path = directory / directories.CHECKPOINTS / FILE
        try:
            file = files.open_to_lock(path)
        except OSError as error:
            warn(
                f"{path} cannot be written ({error.strerror}); the last lines show this process's time only."
            )
            yield
            return
        with file:
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                self._add(json.loads(file.read(_SIZE)))
            self._thread = threading.Thread(
                target=self._write_until_end, args=(file.fileno(),), daemon=True
            )
            self._thread.start()
            try:
                yield
            finally:
                self._ended.set()
                self._thread.join()

    def _add(self, written: Any) -> None:
        """Adds what earlier processes have written."""
        seconds = {part: float(written["seconds"][part]) for part in PARTS}
        num_starts, step = int(written["starts"]), int(written["step"])
        self.seconds = {part: self.seconds[part] + seconds[part] for part in PARTS}
        self.num_starts, self._step, self._repeats_to = num_starts + 1, step, step

    def _write_until_end(self, file: int) -> None:
        is_last = False
        while not is_last:
            age = time.perf_counter() - self._began
            is_last = self._ended.wait(min(max(_SHORTEST, age / _SHARE), _LONGEST))
            self._switch()
            seconds = {part: round(value, 3) for part, value in self.seconds.items()}
            values = {"starts": self.num_starts, "step": self._step, "seconds": seconds}
            with suppress(OSError):  # training continues
                os.pwrite(file, json.dumps(values).ljust(_SIZE).encode(), 0)

    @property
    def total(self) -> float:
        """Returns the seconds of all processes until now."""
        self._switch()
        return sum(self.seconds.values())
