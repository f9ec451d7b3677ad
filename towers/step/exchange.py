"""The exchange between workers in a step; a process that is alone needs none of it.

    tower:     0   1   2   3   4   5            6 towers on 3 workers
               worker 0  worker 1  worker 2
                \\ /      |   |     |   |
                 +        |   |     |   |      a subtree that lies on one worker is added there
                  \\      /     \\   /    |
                     +           +    /        the rest by all of them: each adds one slice of all
                       \\          \\ /          values (all-to-all), and hands the sum of its slice
                        \\          +           to the others (gather)
                         \\        /
                             +

The tree is the one of `averaging`: its shape follows from the number of towers alone, so that the
sum has the same bits on any number of workers. Every worker knows the global batch; of the others'
shards it needs nothing but their sizes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, Union

import tensorflow as tf

from towers.workers.cluster import Cluster
from towers.workers.watch import ANOTHER_BATCH
from towers.workers.worker_collectives import WorkerCollectives
from towers.step.averaging import Tree, Values, add, add_tree, middle, partial_sums
from towers.step.sharding import BatchValues, Shard, batch_size, concat_shards, rows_of
from towers.step.transfers import pack, packages, unpack
from towers.step.tensor_rows import join_rows, sparse_rows


class Subtree(NamedTuple):
    """A largest subtree of the tree of additions whose towers all have one owner.

    owner: a worker's or device's index. slot: the subtree's among its owner's. towers: the indices.
    """

    owner: int
    slot: int
    towers: range


Plan: TypeAlias = Union[Subtree, tuple["Plan", "Plan"]]


def towers_of(worker: int, num_workers: int, num_towers: int) -> range:
    """The towers of worker w: w * T // W ... (w + 1) * T // W - 1."""
    begin, end = (index * num_towers // num_workers for index in (worker, worker + 1))
    return range(begin, end)


def make_plan(owners: Sequence[int]) -> Plan:
    """The tree over T towers, down to the subtrees of one owner; `owners`: of each, ascending."""
    used = [0] * (max(owners) + 1)

    def plan(towers: range) -> Plan:
        owner = owners[towers[0]]
        if owners[towers[-1]] == owner:
            used[owner] += 1
            return Subtree(owner, used[owner] - 1, towers)
        half_way = middle(len(towers))
        return plan(towers[:half_way]), plan(towers[half_way:])

    return plan(range(len(owners)))


def subtrees(plan: Plan) -> list[Subtree]:
    """A plan's subtrees, in the order of their towers."""
    if isinstance(plan, Subtree):
        return [plan]
    return [subtree for half in plan for subtree in subtrees(half)]


def make_exchange(cluster: Cluster, num_towers: int) -> "Exchange":
    """The exchange of one step.

    Raises:
        ValueError: a worker would have no tower.
    """
    if cluster.num_workers == 1:
        return Exchange(num_towers)
    if num_towers < cluster.num_workers:
        raise ValueError(
            f"num_towers ({num_towers}) must be at least the number of workers, "
            f"{cluster.num_workers}: it counts the towers of all of them."
        )
    return WorkersExchange(cluster, num_towers)


class Exchange:
    """The exchange of a process that is alone: it hands on what it has.

    mine: the towers of this worker.
    """

    def __init__(self, num_towers: int) -> None:
        """Args: num_towers: T."""
        self.mine = range(num_towers)

    def places(self, devices: Sequence[str]) -> list[str]:
        """The place of each of the T towers, given the devices of this worker's towers."""
        return list(devices)

    def reduce(self, values: Sequence[Values], devices: Sequence[str], **options: Any) -> Tree:
        """The tree of the additions over T towers that are left; `options`: of `partial_sums`.

        Args:
            values: this worker's towers x V values.
            devices: the device of each of these towers.
        """
        return partial_sums(values, devices, **options)

    def rows(self, values: Sequence[tf.Tensor], shards: Sequence[Shard]) -> tf.Tensor:
        """The rows of all towers' shards, in order, without those of empty shards.

        Args:
            values: of each tower of this worker, [max(n, 1), ...].
            shards: of all T towers.
        """
        return concat_shards(values, shards)

    def one_a_tower(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values of all T towers, of one shape.

        Args:
            values: of each tower of this worker.
        """
        return list(values)

    def of_tower_0(self, values: Sequence[tf.Tensor | None]) -> Sequence[tf.Tensor | None]:
        """Tower 0's values, where each worker has those of its first tower; None stays None."""
        return values

    def check_same_batch(self, batch: BatchValues) -> None:
        """Lets the step fail, in every worker, where one has another global batch than another."""


class WorkersExchange(Exchange):
    """The exchange between several workers, in the step's graph."""

    def __init__(self, cluster: Cluster, num_towers: int) -> None:
        """Args: cluster: at least 2 workers. num_towers: T, at least one for each worker."""
        self._num_workers = cluster.num_workers
        self._num_towers = num_towers
        workers = range(cluster.num_workers)
        self._plan = make_plan([w for w in workers for _ in self._towers_of(w)])
        self.mine = self._towers_of(cluster.index)
        self._mine = [s.towers for s in subtrees(self._plan) if s.owner == cluster.index]
        self._most = 1 + max(subtree.slot for subtree in subtrees(self._plan))  # of any worker
        self._collectives = WorkerCollectives(cluster.num_workers, cluster.index)

    def places(self, devices: Sequence[str]) -> list[str]:
        """The device of each of this worker's towers; "worker 1" for a tower of another worker."""
        counts = [len(self._towers_of(w)) for w in range(self._num_workers)]
        found = [f"worker {w}" for w, count in enumerate(counts) for _ in range(count)]
        found[self.mine.start: self.mine.stop] = devices
        return found

    def reduce(self, values: Sequence[Values], devices: Sequence[str], **options: Any) -> Values:
        """The V sums over all T towers: no additions are left."""
        own = [slice(t.start - self.mine.start, t.stop - self.mine.start) for t in self._mine]
        added = [add_tree(partial_sums(values[t], devices[t], **options)) for t in own]
        sums = list(added[0])
        for i, value in enumerate(added[0]):
            if isinstance(value, (tf.IndexedSlices, tuple)):
                sums[i] = self._add_slices([values[i] for values in added])
        for chosen, shapes in packages(added[0]):
            packed = [pack([values[i] for i in chosen], self._num_workers) for values in added]
            total = self._sum_packed(tf.stack(packed))
            for i, part in zip(chosen, unpack(total, shapes), strict=True):
                sums[i] = part
        return sums

    def rows(self, values: Sequence[tf.Tensor], shards: Sequence[Shard]) -> tf.Tensor:
        own = [rows_of(v, shards[t]) for t, v in zip(self.mine, values, strict=True)]
        sizes = [
            tf.add_n([shards[t].size for t in self._towers_of(w)])
            for w in range(self._num_workers)
        ]
        return self._join(join_rows(own), tf.stack(sizes))

    def one_a_tower(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        counts = [len(self._towers_of(w)) for w in range(self._num_workers)]
        joined = self._join(tf.stack(list(values)), tf.constant(counts))
        return tf.unstack(joined, num=self._num_towers)

    def of_tower_0(self, values: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        received = list(values)
        for chosen, shapes in packages(values):
            packed = self._collectives.broadcast(pack([values[i] for i in chosen]))
            for i, part in zip(chosen, unpack(packed, shapes), strict=True):
                received[i] = part
        return received

    def check_same_batch(self, batch: BatchValues) -> None:
        found = self._collectives.all_gather(fingerprint(batch))
        tf.debugging.assert_equal(
            found, tf.broadcast_to(found[0], tf.shape(found)), message=ANOTHER_BATCH, summarize=99
        )

    def _towers_of(self, worker: int) -> range:
        return towers_of(worker, self._num_workers, self._num_towers)

    def _sum_packed(self, packed: tf.Tensor) -> tf.Tensor:
        """[K, S], the packed values of this worker's K subtrees -> [S], their sum over all workers.

        S: a multiple of W.
        """
        padded = tf.pad(packed, [[0, self._most - packed.shape[0]], [0, 0]])
        slices = tf.reshape(padded, [self._most, self._num_workers, -1])
        received = self._collectives.all_to_all(tf.transpose(slices, [1, 0, 2]))
        total = add_plan(self._plan, lambda subtree: received[subtree.owner, subtree.slot])
        return tf.reshape(self._collectives.all_gather(total), [-1])

    def _add_slices(self, values: Sequence[Any]) -> Any:
        """The sum, by `averaging.add`, of all workers' gradients of an embedding; `values`: K."""
        if isinstance(values[0], tuple):
            return tuple(map(self._add_slices, zip(*values, strict=True)))
        if values[0].dense_shape is None:
            added = self._sum_lookups([v.values for v in values])
            return tf.IndexedSlices(added, values[0].indices)
        return self._join_slices(values)

    def _sum_lookups(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum over all subtrees of K tensors [k, ...]; k is known only when the step runs."""
        padded = tf.stack([*values, *[tf.zeros_like(values[0])] * (self._most - len(values))])
        gathered = self._collectives.all_gather(padded, varies=tf.shape(values[0])[0])
        return add_plan(self._plan, lambda subtree: gathered[subtree.owner, subtree.slot])

    def _join_slices(self, values: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
        """The slices of all workers, joined in the order of the towers."""
        own = values[0]
        for value in values[1:]:
            own = add(own, value)
        sizes = self._collectives.all_gather(tf.shape(own.indices)[0])
        return tf.IndexedSlices(
            self._join(own.values, sizes), self._join(own.indices, sizes), own.dense_shape
        )

    def _join(self, value: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        """[n_w, ...] of each worker -> [sum(n_w), ...] in the workers' order; sizes: n_w, int32."""
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
        most = tf.maximum(tf.reduce_max(sizes), 1)  # TensorFlow dies of gathering nothing
        missing = most - tf.shape(value)[0]
        padded = tf.pad(value, [[0, missing], *[[0, 0]] * (value.shape.rank - 1)])
        gathered = self._collectives.all_gather(padded, varies=most)
        return tf.concat([gathered[w, : sizes[w]] for w in range(self._num_workers)], axis=0)


def fingerprint(batch: BatchValues) -> tf.Tensor:
    """int64 [1 + number of tensors]: N, and a sum over some of each tensor's values.

    At most 64 of each row, times the row's number: other rows, or another order of them, give
    another sum.
    """
    parts = [v for v in tf.nest.flatten(batch, expand_composites=True) if v is not None]
    return tf.stack([tf.cast(batch_size(batch), tf.int64), *map(_row_sum, parts)])


_VALUES_A_ROW = 64


def _row_sum(tensor: tf.Tensor) -> tf.Tensor:
    num_rows = tf.shape(tensor)[0]
    flat = tf.reshape(tensor, [num_rows, tf.reduce_prod(tf.shape(tensor)[1:])])
    some = flat[:, :: tf.maximum(1, tf.shape(flat)[1] // _VALUES_A_ROW)]
    if some.dtype == tf.string:
        numbers = tf.strings.to_hash_bucket_fast(some, 2**31 - 1)
    elif some.dtype.is_floating:
        numbers = tf.cast(tf.bitcast(tf.cast(some, tf.float32), tf.int32), tf.int64)
    else:
        numbers = tf.cast(some, tf.int64)
    weights = tf.range(1, tf.cast(num_rows, tf.int64) + 1)[:, tf.newaxis]
    return tf.reduce_sum(numbers * weights)


def add_plan(plan: Plan, value: Callable[[Subtree], tf.Tensor]) -> tf.Tensor:
    """The sum over a plan of what each of its subtrees has added up."""
    if isinstance(plan, Subtree):
        return value(plan)
    left, right = plan
    return add_plan(left, value) + add_plan(right, value)
