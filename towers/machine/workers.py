"""The workers of a run: joined before TensorFlow starts, watched while they wait for each other.

    a worker is killed             TensorFlow's operations fail in the others: LostWorkerError
    stopped, or never started      it answers nobody: after the timeout the others end, naming it
    waits itself for ever          it answers; after 10 times the timeout, or 10 times the longest
                                   phase so far, the others end
"""

import functools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import numpy as np
import tensorflow as tf

from towers.machine.cluster import ALONE, LOST_WORKER, Cluster, LostWorkerError, find_cluster
from towers.machine.collectives import Collectives
from towers.machine.devices import HOST, has_started
from towers.machine.tensorflow_internals import answers, is_gone, start_collectives
from towers.machine.words import plural

DEFAULT_TIMEOUT = 60.0
ANOTHER_BATCH = "the workers have different global batches"  # a step's assertion
_ANSWER_SECONDS = 3.0
_SOON = 2.0  # seconds of waiting, before the others are asked whether they are there
_MOMENT = 0.5  # seconds, from one such question of who parts to the next
_MOST_LISTED = 3
_PATIENCE = 10  # with who answers: it may be compiling, or writing a large file
_ABOUT_WORKERS = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
)


@functools.cache
def join_workers() -> Cluster:
    """The workers that the environment names; from now on this process is one of them.

    Before TensorFlow starts: then it listens at this worker's address.

    Raises:
        ValueError: the environment makes no sense, TensorFlow has started already, the port is
            taken.
    """
    cluster = find_cluster()
    if cluster is not ALONE:
        if has_started():
            raise ValueError(
                f"the environment names {cluster.num_workers} workers, but TensorFlow has started "
                "already. Import towers before anything uses TensorFlow, or unset TF_CONFIG."
            )
        _check_port(cluster.addresses[cluster.index])
        start_collectives(cluster.addresses, cluster.index)
    return cluster


def _check_port(address: str) -> None:
    """Raises ValueError where another process listens at this worker's port.

    TensorFlow would end with "Could not start gRPC server" and no reason.
    """
    host, _, port = address.rpartition(":")
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise ValueError(
                f"this worker's address is {address}, and port {port} cannot be used: "
                f"{error.strerror}. Is another worker of this index running? Name another port "
                f"for {host}."
            ) from None


class Workers:
    """What the workers tell each other between steps. Every worker makes the same calls.

    cluster: who they are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._is_alone = cluster.num_workers == 1
        if not self._is_alone:
            self._collectives = Collectives(cluster.num_workers, cluster.index)
            self._largest = tf.function(
                lambda row: tf.reduce_max(self._collectives.gather(row), axis=0), autograph=False
            )
            self._partings = Collectives(cluster.num_workers, cluster.index)

    def most(self, *values: int) -> tuple[int, ...]:
        """The largest that any worker gives, of each value from 0 to 2^31 - 1."""
        if self._is_alone:
            return values
        with watched(self.cluster, "the end of a step"), tf.device(HOST):
            return tuple(self._largest(tf.constant(values)).numpy().tolist())

    def check_same(self, what: Mapping[str, object]) -> None:
        """Raises ValueError, in every worker, where one differs from the chief.

        Args:
            what: plain JSON values, by the names that the error tells.
        """
        if self._is_alone:
            return
        chiefs, *others = map(json.loads, self.everyones(json.dumps(what).encode()))
        for worker, theirs in enumerate(others, start=1):
            differ = [name for name in {**chiefs, **theirs} if chiefs.get(name) != theirs.get(name)]
            if differ:
                listed = ", ".join(
                    f"{name} ({theirs.get(name)}, the chief's is {chiefs.get(name)})"
                    for name in differ[:_MOST_LISTED]
                )
                more = f" and {len(differ) - _MOST_LISTED} more" if differ[_MOST_LISTED:] else ""
                self.part()
                raise ValueError(
                    f"worker {worker} ({self.cluster.addresses[worker]}) differs from the chief in "
                    f"{listed}{more}. All workers must be given the same."
                )

    def everyones(self, data: bytes) -> list[bytes]:
        """What each worker gives, in order."""
        if self._is_alone:
            return [data]
        with watched(self.cluster, "the start"), tf.device(HOST):
            sizes = self._collectives.gather(tf.constant(len(data), tf.int64)).numpy()
            padded = np.zeros(max(sizes), np.int32)
            padded[: len(data)] = np.frombuffer(data, np.uint8)
            rows = self._collectives.gather(tf.constant(padded)).numpy().astype(np.uint8)
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def chiefs(self, data: bytes) -> bytes:
        """What the chief gives, in every worker."""
        if self._is_alone:
            return data
        with watched(self.cluster, "the start"), tf.device(HOST):
            size = int(self._collectives.broadcast(tf.constant(len(data), tf.int64)).numpy())
            words = np.zeros(-(-size // 8), np.int64)
            if self.cluster.is_chief:
                words.view(np.uint8)[:size] = np.frombuffer(data, np.uint8)
            return self._collectives.broadcast(tf.constant(words)).numpy().tobytes()[:size]

    def part(self) -> None:
        """Returns when this worker may end, or go on: the others have had all that it told them.

        An operation is done when its last message is on its way, and a process that ends there may
        take it along. So all meet twice: who comes to the second meeting has had the first, and
        whether the second one succeeds matters to nobody.
        """
        if self._is_alone:
            return
        self.most(0)
        second = threading.Thread(target=self._meet_again, daemon=True, name="towers-parting")
        second.start()
        until = time.monotonic() + _Watch.timeout
        while second.is_alive() and time.monotonic() < until and _gone(self.cluster) is None:
            second.join(_MOMENT)

    def _meet_again(self) -> None:
        with suppress(tf.errors.OpError), tf.device(HOST):
            self._partings.gather(tf.constant(0))


@contextmanager
def watched(cluster: Cluster, phase: str) -> Iterator[None]:
    """Within, this process computes with the others, and may wait for them.

    Raises:
        LostWorkerError: one of them is gone. Where one is silent, the process ends by itself with
            `LOST_WORKER` and one line: nothing else ends an operation that waits.
    """
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
            f"{ANOTHER_BATCH} in {phase}. Give each the same examples in the same order: it takes "
            "its own shards of them. What shuffles needs the same seed everywhere, such as "
            "keras.utils.set_random_seed(1)."
        ) from None
    except _ABOUT_WORKERS as error:
        if not _is_about_workers(error):
            raise
        raise LostWorkerError(_lost_text(cluster, phase, str(error))) from None
    finally:
        watch.end()


def set_timeout(seconds: float) -> None:
    """After how many seconds a worker that does not answer is lost; `DEFAULT_TIMEOUT` else."""
    _Watch.timeout = seconds


@functools.cache
def _watch(cluster: Cluster) -> "_Watch":
    return _Watch(cluster)


class _Watch:
    """A thread that ends the process when it waits for a worker that will not come."""

    timeout = DEFAULT_TIMEOUT

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._phase, self._begun, self._longest = "", 0.0, 0.0
        threading.Thread(target=self._run, daemon=True, name="towers-watch").start()

    def begin(self, phase: str) -> None:
        self._phase, self._begun = phase, time.monotonic()

    def end(self) -> None:
        self._longest = max(self._longest, time.monotonic() - self._begun)
        self._begun = 0.0

    def _run(self) -> None:
        while True:
            time.sleep(min(1.0, self.timeout / 4))
            begun = self._begun
            seconds = time.monotonic() - begun if begun else 0.0
            text = None
            if self._longest and seconds >= _SOON:  # all have met before
                text = self._loss()
            if text is None and seconds >= self.timeout:
                text = self._verdict(seconds)
            if text and self._begun == begun:
                print(f"error: {text}", file=sys.stderr, flush=True)
                os._exit(LOST_WORKER)

    def _loss(self) -> str | None:
        """Who has ended while nothing was on its way to him: no operation fails of it."""
        gone = _gone(self._cluster)
        return None if gone is None else _loss_text(self._cluster, gone, self._phase)

    def _verdict(self, seconds: float) -> str | None:
        """What is wrong, after so many seconds of one phase."""
        silent = _silent(self._cluster)
        if silent:
            return _silent_text(self._cluster, silent, self._phase, seconds)
        if seconds < _PATIENCE * max(self.timeout, self._longest):
            return None
        return (
            f"the workers answer, but not all of them came to {self._phase} within {seconds:.0f} "
            "seconds: the worker hangs whose own log does not end with this line."
        )


def _gone(cluster: Cluster) -> int | None:
    return next((w for w in _others(cluster) if is_gone(w, _ANSWER_SECONDS)), None)


def _silent(cluster: Cluster) -> list[int]:
    return [w for w in _others(cluster) if not answers(w, _ANSWER_SECONDS)]


def _others(cluster: Cluster) -> list[int]:
    return [w for w in range(cluster.num_workers) if w != cluster.index]


def _silent_text(cluster: Cluster, silent: list[int], phase: str, seconds: float) -> str:
    names = ", ".join(f"{w} ({cluster.addresses[w]})" for w in silent)
    return (
        f"{plural('worker', len(silent))} {names} did not answer for {seconds:.0f} seconds in "
        f"{phase}. Start the run again with resume=DIR, on any number of workers."
    )


def _is_about_workers(error: tf.errors.OpError) -> bool:
    text = str(error)
    return "ollective" in text or "/job:worker" in text


def _lost_text(cluster: Cluster, phase: str, text: str) -> str:
    named = [int(task) for task in re.findall(r"task:(\d+)", text)]
    lost = next((w for w in reversed(named) if w != cluster.index), None)
    if lost is None:
        lost = next(iter(_silent(cluster)), None)
    if lost is None:
        return f"the workers lost each other in {phase}: {' '.join(text.split())[-600:]}"
    return _loss_text(cluster, lost, phase)


def _loss_text(cluster: Cluster, lost: int, phase: str) -> str:
    return (
        f"worker {lost} ({cluster.addresses[lost]}) was lost in {phase}. Start the run again with "
        "resume=DIR, on any number of workers."
    )
