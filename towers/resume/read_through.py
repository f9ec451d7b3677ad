"""Reads a tf.data.Dataset to its end, to find its length or its labels.

Python runs signal handlers only in the main thread, and not while it waits inside TensorFlow. So
another thread reads, and the main thread waits in Python, where Ctrl-C works.
"""

import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import tensorflow as tf

_ROWS = 16  # elements per batch: little Python time, and a slow source still shows progress
_TICK = 0.5
SECONDS_BETWEEN_LINES = 10.0
_SECONDS_TO_STOP = 2.0


def count_elements(dataset: tf.data.Dataset, what: str) -> int:
    """Counts the elements of a dataset. `what` begins the lines on stderr."""
    return sum(map(len, read_through(dataset.map(lambda *_: 0), what)))


def read_through(values: tf.data.Dataset, what: str) -> Iterator[np.ndarray]:
    """Yields the elements of a dataset in small batches, and prints the progress.

    Args:
        values: a dataset of numbers of one shape. It may be slow, or have no end.
        what: the beginning of the lines on stderr: "counting the examples of mine (train)".
    """
    come: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopped = threading.Event()

    def read() -> None:
        try:
            for batch in values.batch(_ROWS):
                if stopped.is_set():
                    return
                come.put(batch.numpy())
            come.put(None)
        except Exception as error:
            come.put(error)

    thread = threading.Thread(target=read, daemon=True, name="towers-reads")
    thread.start()
    is_unknown = int(values.cardinality()) == tf.data.UNKNOWN_CARDINALITY
    lines = Lines(what, "; if it has no end, end it with .take(N)" if is_unknown else "")
    count = 0
    try:
        while True:
            with suppress(queue.Empty):
                got = come.get(timeout=_TICK)
                if isinstance(got, Exception):
                    raise got
                if got is None:
                    return
                count += len(got)
                yield got
            lines.show(count)
    finally:
        stopped.set()
        thread.join(_SECONDS_TO_STOP)


class Lines:
    """Prints lines on stderr about the progress of work that takes more than a few seconds.

    Each line begins with `what`. The first line ends with `advice`.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        self._what, self._advice = what, advice
        self._begun, self._due = time.monotonic(), 0.2 * SECONDS_BETWEEN_LINES

    def show(self, count: int) -> None:
        """Prints a line with `count` if the last line is old enough."""
        seconds = time.monotonic() - self._begun
        if seconds < self._due or sys.stderr is None:
            return
        with suppress(OSError):
            text = f"{self._what}: {count:,} in {seconds:.0f} s{self._advice}"
            print(text, file=sys.stderr, flush=True)
        self._due, self._advice = seconds + SECONDS_BETWEEN_LINES, ""
