"""Ends a process that waits for a lost worker, and names this worker.

it is killed                   TensorFlow's operations fail in the others: LostWorkerError.
is stopped, or never started   It is silent. After the timeout, the others end and name it.
hangs between two steps        After the timeout, workers compare how long they have waited. The
                               one that has not says where it hangs; all end and name it.
hangs before the first step,   It answers, but does not arrive. After 10 times the timeout, or
in a step, or completely       10 times the longest phase so far, the others end.
"""

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
# Phases without a step, in which workers compare settings and their place in the data.
START, EPOCH = "the start", "the beginning of an epoch"
ANOTHER_BATCH = "the workers have different global batches"  # a step's assertion
_ANSWER_SECONDS = 3.0
_CAUSE_SECONDS = 20.0  # in which a worker whose tower failed finds its error, and ends
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

    If a worker has ended, it raises LostWorkerError. If a worker is silent, the process exits with
    one line and code `LOST_WORKER`, because nothing else ends an operation that waits.
    """
    with hang.step(phase):
        if cluster.num_workers == 1:
            yield
            return
        watch = _Watch.running or _Watch(cluster)
        watch.enter(phase)
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
            if isinstance(error, tf.errors.CancelledError):  # by a failed tower, here or elsewhere
                lost = _first_ended(cluster)
                if not lost:
                    raise RuntimeError(
                        f"a tower of this or another worker failed in {phase}, and TensorFlow "
                        "hides its error. All workers still answer. Run the same towers in one "
                        "process to see the error: unset TF_CONFIG."
                    ) from None
            else:
                named = [int(task) for task in re.findall(r"task:(\d+)", str(error))]
                lost = [w for w in named if w != cluster.index][-1:] or silent(cluster)[:1]
            raise LostWorkerError(
                _lost(cluster, lost, f"was lost in {phase}")
                if lost
                else f"the workers lost each other in {phase}: {' '.join(str(error).split())[-600:]}"
            ) from None
        finally:
            watch.end()


def set_timeout(seconds: float) -> None:
    """Sets the seconds after which a worker that does not answer, or lets others wait, is lost.

    The default is `DEFAULT_TIMEOUT`, and 10 times as long between two steps of a custom script.
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
        watch.enter(None, _PATIENCE)
    try:
        with hang.within(phase):
            yield
    finally:
        if watch is not None:
            watch.enter(None, watch.patience)


def silent(cluster: Cluster, kind: type = tf.errors.OpError) -> list[int]:
    """Returns the workers that do not answer; for an UnavailableError, those that do not run."""
    others = (worker for worker in range(cluster.num_workers) if worker != cluster.index)
    return [w for w in others if isinstance(health_error(w, _ANSWER_SECONDS), kind)]


def _first_ended(cluster: Cluster) -> list[int]:
    """Waits for a worker that ends because its tower failed; returns [worker], or [] if all run."""
    until = time.monotonic() + min(_Watch.timeout, _CAUSE_SECONDS)
    while not (ended := silent(cluster)) and time.monotonic() < until:
        time.sleep(0.5)
    return ended[:1]


class _Doing(NamedTuple):
    """Describes the current phase."""

    phase: str | None  # None while the process does not wait for other workers
    since: float
    thread: int  # in which the phase began
    patience: int  # how many timeouts the other workers wait meanwhile


class _Watch:
    """Runs a thread that ends the process if it waits for a lost worker."""

    timeout = DEFAULT_TIMEOUT
    patience = _PATIENCE
    running: "_Watch | None" = None

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._longest = 0.0  # the longest phase's seconds; 0 until all workers have met
        self._has_stepped = False  # before, workers may read their data for different times
        self.enter(None)
        calls = WorkerCollectives(cluster.num_workers, cluster.index)
        self._gather = tf.function(calls.all_gather, autograph=False)
        self._last_call, self._is_calling = 0.0, False
        _Watch.running = self
        threading.Thread(target=self._run, daemon=True, name="towers-watch").start()

    def enter(self, phase: str | None, patience: int = 1) -> None:
        self._doing = _Doing(phase, time.monotonic(), threading.get_ident(), patience)

    def end(self) -> None:
        self._longest = max(self._longest, time.monotonic() - self._doing.since)
        self._has_stepped |= self._doing.phase not in (START, EPOCH)
        self.enter(None, self.patience)

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout / 4))
            doing, now, cluster = self._doing, time.monotonic(), self._cluster
            phase, seconds = doing.phase, now - doing.since
            is_time = now - max(doing.since, self._last_call) >= self.timeout
            if is_time and self._has_stepped and not self._is_calling:
                self._is_calling = True
                # In a thread, because the others may never come.
                threading.Thread(target=self._compare, daemon=True, name="towers-roll").start()
            if phase is None:
                continue
            text, ended = "", tf.errors.UnavailableError
            if self._longest and seconds >= _SOON and (lost := silent(cluster, ended)):
                text = _lost(cluster, lost[:1], f"was lost in {phase}")
            elif seconds >= self.timeout and (lost := silent(cluster)):
                text = _lost(cluster, lost, f"did not answer for {seconds:.0f} seconds in {phase}")
            elif seconds >= _PATIENCE * max(self.timeout, self._longest):
                text = (
                    f"the workers answer, but not all of them came to {phase} within "
                    f"{seconds:.0f} seconds: the worker hangs whose own log does not end with this "
                    "line."
                )
            if text and self._doing is doing:
                _end(text)

    def _compare(self) -> None:
        """Ends the process if workers have waited too long for workers that did not arrive."""
        with suppress(tf.errors.OpError), tf.device(HOST):
            self._gather(tf.zeros([2], tf.float64))  # now all have arrived: the values are current
            doing = self._doing
            own = time.monotonic() - doing.since
            # Whether this worker waits, and the seconds since this began, divided by its patience.
            told = [doing.phase is not None, own / doing.patience]
            waits, seconds = self._gather(tf.constant(told, tf.float64)).numpy().T
            is_late = seconds >= self.timeout
            late = np.flatnonzero((waits == 0) & is_late).tolist()
            if late and ((waits == 1) & is_late).any() and self._doing is doing:
                if doing.phase is not None:
                    _end(
                        _lost(
                            self._cluster,
                            late,
                            f"did not come to {doing.phase} for {own:.0f} "
                            "seconds, and the log there says where it hangs",
                        )
                    )
                if self._cluster.index in late:
                    _say(
                        f"the others wait for this worker, which has hung for {own:.0f} seconds"
                        f"{hang.stands_in(doing.thread)}. {_GO_ON} If it was at work, give it time "
                        "with a larger worker_timeout."
                    )
                    time.sleep(_SOON)  # the others end first, and name this one
                    os.kill(os.getpid(), signal.SIGABRT)
        self._last_call, self._is_calling = time.monotonic(), False


def _say(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)


def _end(text: str) -> None:
    """Prints an error and exits, because nothing else ends an operation that waits."""
    _say(text)
    os._exit(LOST_WORKER)


def _lost(cluster: Cluster, workers: list[int], what: str) -> str:
    names = ", ".join(f"{w} ({cluster.addresses[w]})" for w in workers)
    return f"{plural('worker', len(workers))} {names} {what}. {_GO_ON}"
