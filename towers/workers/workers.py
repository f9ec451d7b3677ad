"""Joins the workers of a run before TensorFlow starts; exchanges their data between steps."""

import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress

import numpy as np
import tensorflow as tf

from towers.workers import watch
from towers.workers.cluster import ALONE, Cluster, find_cluster
from towers.machine.devices import HOST, has_started
from towers.machine.tensorflow_internals import start_collectives
from towers.workers.watch import START, watched
from towers.workers.worker_collectives import WorkerCollectives

_MOST_LISTED = 3


@functools.cache
def join_workers() -> "Workers":
    """Makes this process one of the workers that TF_CONFIG or Slurm names.

    Call it before anything else uses TensorFlow, which listens at the worker's address from its
    start. Making a model starts TensorFlow. `make_parallel`, `TowerStep`, `train` and
    `logical_cpus` call this function, too.

    Returns:
        The workers, with `num_workers`, this worker's `index` from 0, and `is_chief`, which is true
        for worker 0. Without other workers these are 1, 0 and True. A custom loop uses their
        `all_reduce_max` to stop at the same step everywhere, and ends with their `barrier`.

    Raises:
        ValueError: the environment is wrong, TensorFlow has started already, or the port is taken.
    """
    cluster = find_cluster()
    if cluster is not ALONE:
        if has_started():
            raise ValueError(
                f"the environment names {cluster.num_workers} workers, but TensorFlow has started "
                "before this process joined them: a model's variables start it, too. Call "
                "towers.join_workers() at the top of the script, right after `import towers`, or "
                "unset TF_CONFIG."
            )
        address = cluster.addresses[cluster.index]
        host, _, port = address.rpartition(":")
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:  # TensorFlow would fail with "Could not start gRPC server", without a reason
                probe.bind(("", int(port)))
            except OSError as error:
                raise ValueError(
                    f"this worker's address is {address}, and port {port} cannot be used: "
                    f"{error.strerror}. Is another worker of this index running? Name another port "
                    f"for {host}."
                ) from None
        start_collectives(cluster.addresses, cluster.index)
    return Workers(cluster.addresses, cluster.index)


class Workers(Cluster):
    """Exchanges bytes and numbers between steps. Every worker makes the same calls."""

    @functools.cached_property
    def _collectives(self) -> WorkerCollectives:
        return WorkerCollectives(self.num_workers, self.index)

    @functools.cached_property
    def _partings(self) -> WorkerCollectives:
        return WorkerCollectives(self.num_workers, self.index)

    @functools.cached_property
    def _largest(self) -> Callable[[tf.Tensor], tf.Tensor]:
        gather = self._collectives.all_gather
        return tf.function(lambda row: tf.reduce_max(gather(row), 0), autograph=False)

    def all_reduce_max(self, *values: int) -> tuple[int, ...]:
        """Returns the largest value of all workers, for each value (from 0 to 2^31 - 1).

        ```python
        (stop,) = workers.all_reduce_max(int(time.time() > end))  # nonzero if one worker says so
        ```
        """
        if self.num_workers == 1:
            return values
        with watched(self, "the end of a step"), tf.device(HOST):
            return tuple(self._largest(tf.constant(values)).numpy().tolist())

    def check_same(self, what: Mapping[str, object], phase: str = START) -> None:
        """Raises ValueError, in every worker, if a worker's JSON values differ from the chief's.

        phase: when this happens, for the error that a lost worker causes.
        """
        if self.num_workers == 1:
            return
        chiefs, *others = map(json.loads, self.all_gather(json.dumps(what).encode(), phase))
        for worker, theirs in enumerate(others, start=1):
            differ = [name for name in {**chiefs, **theirs} if chiefs.get(name) != theirs.get(name)]
            if differ:
                listed = ", ".join(
                    f"{name} ({theirs.get(name)}, the chief's is {chiefs.get(name)})"
                    for name in differ[:_MOST_LISTED]
                )
                more = f" and {len(differ) - _MOST_LISTED} more" if differ[_MOST_LISTED:] else ""
                self.barrier()
                raise ValueError(
                    f"worker {worker} ({self.addresses[worker]}) differs from the chief in "
                    f"{listed}{more}. All workers must be given the same."
                )

    def all_gather(self, data: bytes, phase: str = START) -> list[bytes]:
        """Returns the bytes of every worker, in worker order."""
        if self.num_workers == 1:
            return [data]
        with watched(self, phase), tf.device(HOST):
            sizes = self._collectives.all_gather(tf.constant(len(data), tf.int64)).numpy()
            rows = self._collectives.all_gather(_words(data, max(sizes))).numpy()
        return [row.tobytes()[:size] for row, size in zip(rows, sizes, strict=True)]

    def broadcast(self, data: bytes) -> bytes:
        """Returns the chief's bytes in every worker."""
        if self.num_workers == 1:
            return data
        with watched(self, START), tf.device(HOST):
            size = int(self._collectives.broadcast(tf.constant(len(data), tf.int64)).numpy())
            words = _words(data if self.is_chief else b"", size)
            return self._collectives.broadcast(words).numpy().tobytes()[:size]

    def barrier(self) -> None:
        """Waits until this worker may end or continue: the others have received its data."""
        if self.num_workers == 1:
            return
        # An operation is done when its last message is under way, which an ending process may lose.
        # So workers meet twice: whoever begins the second meeting, which may fail, ended the first.
        self.all_reduce_max(0)

        def meet_again() -> None:
            with suppress(tf.errors.OpError), tf.device(HOST):
                self._partings.all_gather(tf.constant(0))

        second = threading.Thread(target=meet_again, daemon=True, name="towers-parting")
        second.start()
        until = time.monotonic() + watch.timeout()
        while second.is_alive() and time.monotonic() < until:
            if watch.silent(self, tf.errors.UnavailableError):
                break  # it has ended
            second.join(0.5)


def _words(data: bytes, size: int) -> tf.Tensor:
    """Returns bytes as int64, padded to `size` bytes; at least one, as TensorFlow requires."""
    count = max(1, -(-size // 8))
    return tf.constant(np.frombuffer(data.ljust(8 * count, b"\0"), np.int64))
