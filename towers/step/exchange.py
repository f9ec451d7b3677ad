"""Exchanges values between workers in a step; a single process exchanges nothing.

    tower:     0   1   2   3   4   5            6 towers on 3 workers
               worker 0  worker 1  worker 2
                \\ /      |   |     |   |
                 +        |   |     |   |      A worker first adds its towers' subtrees.
                  \\      /     \\   /    |
                     +           +    /        Each worker adds one slice of all values
                       \\          \\ /          (all-to-all).
                        \\          +           All workers gather the summed slices.
                         \\        /
                             +

The tree is the one in `averaging`. Its shape depends on the number of towers alone, so the sum has
the same bits on any number of workers. A worker needs only the sizes of other workers' shards.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from towers.machine.devices import Policy
from towers.step.averaging import Tree, Values, add_subtrees, add_tree, partial_sums, subtrees
from towers.step.checks import check_agreement
from towers.step.raw_variables import RawVariable
from towers.step.sharding import Shard, batch_size, rows_of, shard_batch
from towers.step.structures import (
    BatchTensor,
    Structure,
    components,
    is_composite,
    join_rows,
    map_tensors,
    sparse_rows,
    take_rows,
)
from towers.step.transfers import pack, packages, unpack
from towers.workers.watch import ANOTHER_BATCH
from towers.workers.worker_collectives import WorkerCollectives
from towers.workers.workers import Workers

_WIDTHS = "the workers' rows have different shapes: pad them to one shape"


def towers_of(worker: int, num_workers: int, num_towers: int) -> range:
    """Returns the towers of worker w: w * T // W ... (w + 1) * T // W - 1."""
    begin, end = (index * num_towers // num_workers for index in (worker, worker + 1))
    return range(begin, end)


def make_exchange(workers: Workers, num_towers: int, own_rows: bool = False) -> "Exchange":
    """Returns the exchange of one step; raises ValueError if there are more workers than towers.

    own_rows: whether a worker has only the rows of its towers, and the first row.
    """
    if workers.num_workers == 1:
        return LocalExchange(num_towers)
    if num_towers < workers.num_workers:
        raise ValueError(
            f"num_towers ({num_towers}) must be at least the number of workers, "
            f"{workers.num_workers}: it counts the towers of all of them."
        )
    return WorkersExchange(workers, num_towers, own_rows)


class Exchange(Protocol):
    """Exchanges values between the workers of a step.

    num_towers: T, the number of towers of all workers. local_towers: the towers of this worker.
    is_alone: whether there is one worker. has_own_rows: whether a worker has only the rows of its
    towers, and the first row.
    """

    num_towers: int
    local_towers: range
    is_alone: bool
    has_own_rows: bool

    def places(self, devices: Sequence[str]) -> list[str]:
        """Returns the place of each of the T towers, given the devices of this worker's towers.

        The place is a device of this worker, or "worker 1".
        """

    def reduce(
        self, values: Sequence[Values], devices: Sequence[str], policy: Policy,
        parameter_device: str | None = None,
    ) -> Tree:  # fmt: skip
        """Returns `partial_sums` over T towers, given this worker's values and devices.

        With several workers, no additions remain: the tree is the V sums.
        """

    def all_gather(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the values of all T towers, given this worker's; all have one shape."""

    def concat(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Joins tensors [m_t, ...] in the towers' order, given the tensors of this worker."""

    def broadcast(self, values: Sequence[tf.Tensor | None]) -> Sequence[tf.Tensor | None]:
        """Broadcasts tower 0's values. Each worker passes its first tower's; None is kept."""

    def agreed_batch(self, batch: Structure) -> Structure:
        """Returns the batch, whose ragged and sparse tensors have the rows of all workers.

        Makes the step fail in every worker if the workers' global batches differ.
        """

    def check_agreement(
        self, variables: Sequence[RawVariable], settings: Mapping[str, object]
    ) -> None:
        """Raises ValueError if workers differ in versions, settings or the values of variables."""


class LocalExchange(Exchange):
    """Returns the values of its T towers: there is one worker."""

    is_alone, has_own_rows = True, False

    def __init__(self, num_towers: int) -> None:
        self.num_towers, self.local_towers = num_towers, range(num_towers)

    def places(self, devices: Sequence[str]) -> list[str]:
        return list(devices)

    def reduce(
        self, values: Sequence[Values], devices: Sequence[str], policy: Policy,
        parameter_device: str | None = None,
    ) -> Tree:  # fmt: skip
        return partial_sums(values, devices, policy, parameter_device)

    def all_gather(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(values)

    def concat(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.concat(values, axis=0)

    def broadcast(self, values: Sequence[tf.Tensor | None]) -> Sequence[tf.Tensor | None]:
        return values

    def agreed_batch(self, batch: Structure) -> Structure:
        return batch

    def check_agreement(
        self, variables: Sequence[RawVariable], settings: Mapping[str, object]
    ) -> None:
        pass


class WorkersExchange(Exchange):
    """Exchanges values between several workers, in the step's graph; each has a tower."""

    is_alone = False

    def __init__(self, workers: Workers, num_towers: int, own_rows: bool) -> None:
        self._workers, self._num_workers, self._index = workers, workers.num_workers, workers.index
        self.num_towers, self.has_own_rows = num_towers, own_rows
        indices = range(self._num_workers)
        self._towers = [towers_of(w, self._num_workers, num_towers) for w in indices]
        assert sum(map(len, self._towers)) == num_towers, "each tower has one worker"
        self.local_towers = self._towers[self._index]
        found = subtrees([w for w in indices for _ in self._towers[w]])
        self._subtrees = [[towers for owner, towers in found if owner == w] for w in indices]
        # Workers send equally many vectors, because a collective takes equal shapes.
        self._max_subtrees = max(map(len, self._subtrees))
        begin, own = self.local_towers.start, self._subtrees[self._index]
        self._local_subtrees = [slice(towers.start - begin, towers.stop - begin) for towers in own]
        self._collectives = WorkerCollectives(self._num_workers, self._index)

    def places(self, devices: Sequence[str]) -> list[str]:
        found = [f"worker {w}" for w, towers in enumerate(self._towers) for _ in towers]
        found[self.local_towers.start : self.local_towers.stop] = devices
        return found

    def reduce(
        self, values: Sequence[Values], devices: Sequence[str], policy: Policy,
        parameter_device: str | None = None,
    ) -> Tree:  # fmt: skip
        trees = [
            partial_sums(values[towers], devices[towers], policy, parameter_device)
            for towers in self._local_subtrees
        ]
        added = list(map(add_tree, trees))
        sums = list(added[0])
        # Each worker adds a slice of packed vectors. Open shapes cannot be packed: one by one.
        for i, value in enumerate(added[0]):
            if not value.shape.is_fully_defined():
                sums[i] = self._add_open([own[i] for own in added])
        for chosen, shapes in packages(added[0]):
            vectors = [pack([own[i] for i in chosen], self._num_workers) for own in added]
            for i, part in zip(chosen, unpack(self._add_vectors(vectors), shapes), strict=True):
                sums[i] = part
        return sums

    def _rows(self, values: Sequence[BatchTensor], shards: Sequence[Shard]) -> BatchTensor:
        """Joins the rows of T shards, in order, given this worker's [max(n, 1), ...]."""
        own = [rows_of(v, shards[t]) for t, v in zip(self.local_towers, values, strict=True)]
        sizes = [tf.add_n([shards[t].size for t in towers]) for towers in self._towers]
        return self._join(join_rows(own), tf.stack(sizes))

    def all_gather(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        counts = tf.constant(list(map(len, self._towers)))
        return tf.unstack(self._join(tf.stack(list(values)), counts), num=self.num_towers)

    def concat(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        own = tf.concat(values, axis=0)
        return self._join(own, self._collectives.all_gather(batch_size(own)))

    def broadcast(self, values: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        received = list(values)
        for i, value in enumerate(values):
            if value is not None and not value.shape.is_fully_defined():
                sizes = self._collectives.all_gather(batch_size(value))
                sizes *= tf.one_hot(0, self._num_workers, dtype=tf.int32)  # no rows of the others
                received[i] = self._join(value[: sizes[self._index]], sizes)
        for chosen, shapes in packages(values):
            packed = self._collectives.broadcast(pack([values[i] for i in chosen]))
            for i, part in zip(chosen, unpack(packed, shapes), strict=True):
                received[i] = part
        return received

    def agreed_batch(self, batch: Structure) -> Structure:
        compared = batch
        if self.has_own_rows:  # N and the first example are all that every worker has
            first = map_tensors(lambda v: take_rows(v, [0], [1]), batch)
            compared = (tf.range(batch_size(batch)), first, None)
        found = self._collectives.all_gather(fingerprint(compared))
        tf.debugging.assert_equal(
            found, tf.broadcast_to(found[0], tf.shape(found)), message=ANOTHER_BATCH, summarize=99
        )
        if not self.has_own_rows or not any(map(is_composite, tf.nest.flatten(batch))):
            return batch
        shards = shard_batch(batch, self.num_towers)
        own = [tf.nest.flatten(shards[t].values) for t in self.local_towers]
        joined = [
            self._rows(values, shards) if is_composite(whole) else whole
            for whole, values in zip(tf.nest.flatten(batch), zip(*own, strict=True), strict=True)
        ]
        return tf.nest.pack_sequence_as(batch, joined)

    def check_agreement(
        self, variables: Sequence[RawVariable], settings: Mapping[str, object]
    ) -> None:
        check_agreement(self._workers, variables, settings)

    def _add_vectors(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sum of all workers' vectors [a multiple of W], one for each own subtree."""
        padded = tf.pad(tf.stack(values), [[0, self._max_subtrees - len(values)], [0, 0]])
        slices = tf.reshape(padded, [self._max_subtrees, self._num_workers, -1])
        received = self._collectives.all_to_all(tf.transpose(slices, [1, 0, 2]))
        sums = {
            towers: received[worker, i]
            for worker, own in enumerate(self._subtrees)
            for i, towers in enumerate(own)
        }
        added = add_subtrees(sums, range(self.num_towers))
        return tf.reshape(self._collectives.all_gather(added), [-1])

    def _add_open(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the sum of all workers' tensors, whose shape is known when the step runs."""
        first, size = values[0], tf.size(values[0])
        missing = self._num_workers - size % self._num_workers  # never 0, but `size` may be
        padded = [tf.pad(tf.reshape(value, [-1]), [[0, missing]]) for value in values]
        total = tf.reshape(self._add_vectors(padded)[:size], tf.shape(first))
        return tf.ensure_shape(total, first.shape)

    def _join(self, value: BatchTensor, sizes: tf.Tensor) -> BatchTensor:
        """Joins [n_w, ...] of all workers to [sum(n_w), ...], in their order; sizes: n_w, int32."""
        if isinstance(value, tf.RaggedTensor):
            counts = self._collectives.all_gather(batch_size(value.values))
            lengths = self._join(value.row_lengths(), sizes)
            return tf.RaggedTensor.from_row_lengths(self._join(value.values, counts), lengths)
        if isinstance(value, tf.SparseTensor):
            counts = self._collectives.all_gather(batch_size(value.values))
            indices, values = (self._join(v, counts) for v in (value.indices, value.values))
            begins = tf.repeat(tf.cumsum(tf.cast(sizes, tf.int64), exclusive=True), counts)
            num_rows = tf.reduce_sum(tf.cast(sizes, tf.int64), keepdims=True)
            return sparse_rows(value, indices[:, 0] + begins, indices, values, num_rows)
        if not value.shape[1:].is_fully_defined():
            widths = self._collectives.all_gather(tf.shape(value)[1:])
            same = tf.broadcast_to(widths[0], tf.shape(widths))
            with tf.control_dependencies([tf.debugging.assert_equal(widths, same, _WIDTHS)]):
                value = tf.identity(value)
        most = tf.maximum(tf.reduce_max(sizes), 1)  # gathering 0 rows crashes TensorFlow
        padded = tf.pad(value, [[0, most - tf.shape(value)[0]], *[[0, 0]] * (value.shape.rank - 1)])
        gathered = self._collectives.all_gather(padded)
        return tf.concat([gathered[w, : sizes[w]] for w in range(self._num_workers)], axis=0)


def fingerprint(batch: Structure) -> tf.Tensor:
    """Returns N and a checksum of each tensor: int64 [1 + number of tensors].

    A checksum adds at most 127 values of each row, times the row's number: the order counts.
    """
    return tf.stack([tf.cast(batch_size(batch), tf.int64), *map(_row_sum, components(batch))])


def _row_sum(tensor: tf.Tensor) -> tf.Tensor:
    num_rows = tf.shape(tensor)[0]
    flat = tf.reshape(tensor, [num_rows, tf.reduce_prod(tf.shape(tensor)[1:])])
    some = flat[:, :: tf.maximum(1, tf.shape(flat)[1] // 64)]
    if some.dtype == tf.string:
        numbers = tf.strings.to_hash_bucket_fast(some, 2**31 - 1)
    elif some.dtype.is_floating:
        numbers = tf.cast(tf.bitcast(tf.cast(some, tf.float32), tf.int32), tf.int64)
    else:
        numbers = tf.cast(some, tf.int64)
    return tf.reduce_sum(numbers * tf.range(1, tf.cast(num_rows, tf.int64) + 1)[:, tf.newaxis])
