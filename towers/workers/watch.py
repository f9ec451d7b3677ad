"""Ends a process that waits for a lost worker, and names this worker.

    it is killed                   TensorFlow's operations fail in the others: LostWorkerError.
    is stopped, or never started   It is silent. After the timeout, the others end and name it.
    hangs between two steps        After the timeout, workers compare how long they have waited. The
                                   one that has not says where it hangs; all end and name it.
    hangs before the first step,   It answers, but does not arrive. After 10 times the timeout, or
    in a step, or completely       10 times the longest phase so far, the others end.
"""

import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.machine import hang
from towers.machine.devices import HOST
from towers.machine.tensorflow_internals import health_error
from towers.machine.words import plural
from towers.workers.cluster import Cluster, LOST_WORKER, LostWorkerError
from towers.workers.worker_collectives import WorkerCollectives

DEFAULT_TIMEOUT = 60.0
START = "the start"  # the phase in which workers compare settings and load their data
ANOTHER_BATCH = "the workers have different global batches"  # a step's assertion
_ANSWER_SECONDS = 3.0
_SOON = 2.0  # seconds of waiting before a check whether the other workers have ended
_PATIENCE = 10  # timeouts for a worker that answers: it may be compiling, or writing a large file
_ABOUT_WORKERS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)
_GO_ON = "Start the run again with resume=DIR, on any number of workers."


@contextmanager
def watched(cluster: Cluster, phase: str) -> Iterator[None]:
    """Inside the context, this process computes with the other workers, and may wait for them.

    Raises:
        LostWorkerError: a worker has ended. If a worker is silent, the process exits with one line
            and code `LOST_WORKER`, because nothing else ends an operation that waits.
    """
    with hang.step(phase):
        if cluster.num_workers == 1:
            yield
            return
        watch = _watch(cluster)
        watch.begin(phase)
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if ANOTHER_BATCH not in str(error):
                raise
            raise ValueError(
                f"{ANOTHER_BATCH} in {phase}. Give each the same examples in the same order: it "
                "takes its own shards of them. Shuffle with the same seed everywhere: "
                "keras.utils.set_random_seed(1)."
            ) from None
        except _ABOUT_WORKERS as error:
            if not re.search("ollective|/job:worker", str(error)):
                raise
            raise LostWorkerError(_lost_text(cluster, phase, str(error))) from None
        finally:
            watch.end()


def set_timeout(seconds: float) -> None:
    """Sets the seconds after which a worker that does not answer, or lets others wait, is lost.

    The default is `DEFAULT_TIMEOUT`, and 10 times as long for a worker between two steps, where a
    custom script may do anything.
    """
    _Watch.timeout, _Watch.patience = seconds, 1


def timeout() -> float:
    """Returns the seconds after which a worker counts as lost."""
    return _Watch.timeout


@contextmanager
def at_work(phase: str) -> Iterator[None]:
    """Inside the context, for writing a file, other workers wait for 10 times the timeout."""
    watch = _Watch.running
    if watch is not None:
        watch.pause(_PATIENCE)
    try:
        with hang.within(phase):
            yield
    finally:
        if watch is not None:
            watch.pause()


def gone(cluster: Cluster) -> int | None:
    """Returns a worker that has ended or has not started yet; None if there is none."""
    errors = ((w, health_error(w, _ANSWER_SECONDS)) for w in _others(cluster))
    return next((w for w, e in errors if isinstance(e, tf.errors.UnavailableError)), None)


class _Doing(NamedTuple):
    """Describes a phase; `phase` is None while the process does not wait for other workers.

    thread: the identifier of the thread in which the phase began.
    patience: how many timeouts the other workers wait meanwhile.
    """

    phase: str | None
    since: float
    thread: int
    patience: int = 1


class _Watch:
    """Runs a thread that ends the process if it waits for a lost worker."""

    timeout = DEFAULT_TIMEOUT
    patience = _PATIENCE
    running: "_Watch | None" = None

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._longest = 0.0  # the longest phase's seconds; 0 until all workers have met
        self._has_stepped = False  # before, workers may read their data for different times
        self._doing = _Doing(None, time.monotonic(), threading.get_ident())
        calls = WorkerCollectives(cluster.num_workers, cluster.index)
        self._gather = tf.function(calls.all_gather, autograph=False)
        self._last_call, self._is_calling = 0.0, False
        _Watch.running = self
        threading.Thread(target=self._run, daemon=True, name="towers-watch").start()

    def begin(self, phase: str) -> None:
        self._doing = _Doing(phase, time.monotonic(), threading.get_ident())

    def end(self) -> None:
        self._longest = max(self._longest, time.monotonic() - self._doing.since)
        self._has_stepped |= self._doing.phase != START
        self.pause()

    def pause(self, patience: int | None = None) -> None:
        patience = patience or self.patience
        self._doing = _Doing(None, time.monotonic(), threading.get_ident(), patience)

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout / 4))
            doing, now = self._doing, time.monotonic()
            seconds = now - doing.since
            is_time = now - max(doing.since, self._last_call) >= self.timeout
            if is_time and self._has_stepped and not self._is_calling:
                self._is_calling = True
                roll = threading.Thread(target=self._find_silent, daemon=True, name="towers-roll")
                roll.start()
            if doing.phase is None:
                continue
            text = None
            if self._longest and seconds >= _SOON:  # one may have ended while it sent nothing
                lost = gone(self._cluster)
                text = None if lost is None else _loss_text(self._cluster, lost, doing.phase)
            if text is None and seconds >= self.timeout:
                text = self._verdict(doing.phase, seconds)
            if text and self._doing is doing:
                _end(text)

    def _verdict(self, phase: str, seconds: float) -> str | None:
        """Returns the error after so many seconds in one phase, or None to wait longer."""
        silent = _silent(self._cluster)
        if silent:
            named = _named(self._cluster, silent)
            return f"{named} did not answer for {seconds:.0f} seconds in {phase}. {_GO_ON}"
        if seconds < _PATIENCE * max(self.timeout, self._longest):
            return None
        return (
            f"the workers answer, but not all of them came to {phase} within {seconds:.0f} "
            "seconds: the worker hangs whose own log does not end with this line."
        )

    # A worker that is in one phase for longer than the timeout compares waiting times with the
    # others, to find the worker that all wait for. A thread does it: the others may never come.

    def _find_silent(self) -> None:
        with suppress(tf.errors.OpError), tf.device(HOST):
            self._gather(tf.zeros([2], tf.float64))  # now all have arrived: the values are current
            doing = self._doing
            patient = (time.monotonic() - doing.since) / doing.patience
            told = self._gather(tf.constant([doing.phase is not None, patient], tf.float64))
            self._judge(doing, told.numpy())
        self._last_call, self._is_calling = time.monotonic(), False

    def _judge(self, doing: _Doing, told: np.ndarray) -> None:
        """Ends the process if workers have waited too long for workers that did not arrive.

        Args:
            doing: the phase that this worker has reported.
            told: [W, 2]: whether a worker waits (1 or 0), and the seconds since this began,
                divided by its patience.
        """
        waits, seconds = told[:, 0] == 1, told[:, 1]
        own_seconds = time.monotonic() - doing.since
        late = np.flatnonzero(~waits & (seconds >= self.timeout)).tolist()
        if not late or not (waits & (seconds >= self.timeout)).any() or self._doing is not doing:
            return
        if doing.phase is not None:
            _end(
                f"{_named(self._cluster, late)} did not come to {doing.phase} for "
                f"{own_seconds:.0f} seconds, and the log there says where it hangs. {_GO_ON}"
            )
        elif self._cluster.index in late:
            _say(
                f"the others wait for this worker, which has hung for {own_seconds:.0f} seconds"
                f"{hang.stands_in(doing.thread)}. {_GO_ON} If it was at work, give it time with a "
                "larger worker_timeout."
            )
            time.sleep(_SOON)  # the others end first, and name this one
            os.kill(os.getpid(), signal.SIGABRT)


_watch = functools.cache(_Watch)


def _say(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _end(text: str) -> None:
    """Prints an error and exits, because nothing else ends an operation that waits."""
    _say(text)
    os._exit(LOST_WORKER)


def _silent(cluster: Cluster) -> list[int]:
    return [w for w in _others(cluster) if health_error(w, _ANSWER_SECONDS)]


def _others(cluster: Cluster) -> list[int]:
    return [w for w in range(cluster.num_workers) if w != cluster.index]


def _named(cluster: Cluster, workers: list[int]) -> str:
    names = ", ".join(f"{w} ({cluster.addresses[w]})" for w in workers)
    return f"{plural('worker', len(workers))} {names}"


def _lost_text(cluster: Cluster, phase: str, text: str) -> str:
    named = [int(task) for task in re.findall(r"task:(\d+)", text)]
    lost = next((w for w in reversed(named) if w != cluster.index), None)
    if lost is None:
        lost = next(iter(_silent(cluster)), None)
    if lost is None:
        return f"the workers lost each other in {phase}: {' '.join(text.split())[-600:]}"
    return _loss_text(cluster, lost, phase)


def _loss_text(cluster: Cluster, lost: int, phase: str) -> str:
    return f"{_named(cluster, [lost])} was lost in {phase}. {_GO_ON}"
