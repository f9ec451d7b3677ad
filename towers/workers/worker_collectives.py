"""Runs TensorFlow's collective operations between workers, on the CPU and over gRPC.

    all_gather     worker w gives a row         ->  every worker has all rows, in order.
    all_to_all     worker w gives W rows        ->  worker w has row w of every worker.
    broadcast      the chief gives a value      ->  every worker has it.

TensorFlow matches operations by key, so every worker must make the same operations in the same
order. Operations with different shapes both fail; if a shape varies, `varies` changes the key. An
operation without elements kills the process.
"""

import itertools

import tensorflow as tf

_GROUP_KEYS = itertools.count(1)
_MOST_ROWS = 2**20  # keys of one operation; the other bits of 31 count operations
_KNOWN = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


class WorkerCollectives:
    """Groups all W workers, at least 2, for the collective operations of one step or purpose."""

    def __init__(self, num_workers: int, index: int) -> None:
        self.num_workers = num_workers
        self._index = index
        # Every worker gets the same key, because all make the same groups in the same order.
        self._group_key = next(_GROUP_KEYS)
        self._count = itertools.count(1)
        # Operations order workers by name: with 11 or more workers, 10 comes before 2.
        self._members = sorted(range(num_workers), key=str)
        self._positions = [self._members.index(worker) for worker in range(num_workers)]

    def all_gather(self, value: tf.Tensor, varies: tf.Tensor | None = None) -> tf.Tensor:
        """Gathers [n, ...], the same shape in every worker, to [W, n, ...], in worker order.

        `varies` is a scalar int32 computed from the shape, if the shape differs between steps.
        """
        wire = _on_the_wire(value)
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=wire[tf.newaxis], instance_key=self._key(varies), ordering_token=[],
            **self._group(),
        )
        gathered = tf.ensure_shape(gathered, [self.num_workers, *value.shape])
        return tf.cast(self._taken(gathered, self._positions), value.dtype)

    def all_to_all(self, value: tf.Tensor, varies: tf.Tensor | None = None) -> tf.Tensor:
        """Sends row w of a numeric [W, ...] to worker w; returns [W, ...], row w from worker w."""
        sent = self._taken(_on_the_wire(value), self._members)
        received = tf.raw_ops.CollectiveAllToAllV2(
            input=sent, instance_key=self._key(varies), ordering_token=[], **self._group()
        )
        received = tf.ensure_shape(received, value.shape)
        return tf.cast(self._taken(received, self._positions), value.dtype)

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value; every worker passes a value of the same shape."""
        wire = _on_the_wire(value)
        if self._index == 0:
            sent = tf.raw_ops.CollectiveBcastSendV2(
                input=wire, instance_key=self._key(None), **self._group()
            )
        else:
            sent = tf.raw_ops.CollectiveBcastRecvV2(
                T=wire.dtype, shape=tf.shape(wire), instance_key=self._key(None), **self._group()
            )
        return tf.cast(tf.ensure_shape(sent, value.shape), value.dtype)

    def _group(self) -> dict[str, object]:
        return {
            "group_size": self.num_workers, "group_key": self._group_key,
            "communication_hint": "ring",  # the only implementation between CPUs
        }

    def _key(self, varies: tf.Tensor | None) -> tf.Tensor:
        key = next(self._count) * _MOST_ROWS
        return tf.constant(key) if varies is None else key + varies % _MOST_ROWS

    def _taken(self, rows: tf.Tensor, order: list[int]) -> tf.Tensor:
        """Returns the rows [W, ...] in an order; with up to 10 workers, it changes nothing."""
        return rows if self.num_workers <= 10 else tf.gather(rows, order)


def _on_the_wire(value: tf.Tensor) -> tf.Tensor:
    """Converts a value, exactly, to one of the dtypes that the operations support."""
    if value.dtype in _KNOWN:
        return value
    if value.dtype.size < 4:
        return tf.cast(value, tf.float32 if value.dtype.is_floating else tf.int32)
    return tf.cast(value, tf.int64)
