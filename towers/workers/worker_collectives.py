"""Runs TensorFlow's collective operations between workers, on the CPU and over gRPC.

    all_gather     worker w gives a row         ->  every worker has all rows, in order.
    all_to_all     worker w gives W rows        ->  worker w has row w of every worker.
    broadcast      the chief gives a value      ->  every worker has it.

TensorFlow matches operations by key, so every worker must make the same operations in the same
order. Operations of one key and different shapes both fail, so the sizes of open dimensions change
the key. An operation without elements kills the process.
"""

import functools
import itertools

import tensorflow as tf

_GROUP_KEYS = itertools.count(1)
# Keys have 31 bits. An operation of open dimensions has a range of keys, one for each size modulo a
# prime, so that two sizes rarely have one key.
_KEYS, _PRIME = 2**20, 2**20 - 3
_KNOWN = (tf.float16, tf.float32, tf.float64, tf.int32, tf.int64)


class WorkerCollectives:
    """Groups all W workers, at least 2, for the collective operations of one step or purpose."""

    def __init__(self, num_workers: int, index: int) -> None:
        self.num_workers = num_workers
        self._index = index
        # Every worker gets the same key, because all make the same groups in the same order.
        self._group_key = next(_GROUP_KEYS)
        self._fixed, self._open = itertools.count(1), itertools.count(1)
        # Operations order workers by name: with 11 or more workers, 10 comes before 2.
        self._members = sorted(range(num_workers), key=str)
        self._positions = [self._members.index(worker) for worker in range(num_workers)]

    def all_gather(self, value: tf.Tensor) -> tf.Tensor:
        """Gathers [n, ...], the same shape in every worker, to [W, n, ...], in worker order."""
        gathered = tf.raw_ops.CollectiveGatherV2(
            input=_on_the_wire(value)[tf.newaxis],
            instance_key=self._key(value),
            ordering_token=[],
            **self._group(),
        )
        gathered = tf.ensure_shape(gathered, [self.num_workers, *value.shape])
        return tf.cast(self._taken(gathered, self._positions), value.dtype)

    def all_to_all(self, value: tf.Tensor) -> tf.Tensor:
        """Sends row w of a numeric [W, ...] to worker w; returns [W, ...], row w from worker w."""
        sent = self._taken(_on_the_wire(value), self._members)
        received = tf.raw_ops.CollectiveAllToAllV2(
            input=sent, instance_key=self._key(value), ordering_token=[], **self._group()
        )
        received = tf.ensure_shape(received, value.shape)
        return tf.cast(self._taken(received, self._positions), value.dtype)

    def broadcast(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the chief's value; every worker passes a value of the same shape."""
        wire = _on_the_wire(value)
        if self._index == 0:
            sent = tf.raw_ops.CollectiveBcastSendV2(
                input=wire, instance_key=self._key(value), **self._group()
            )
        else:
            sent = tf.raw_ops.CollectiveBcastRecvV2(
                T=wire.dtype, shape=tf.shape(wire), instance_key=self._key(value), **self._group()
            )
        return tf.cast(tf.ensure_shape(sent, value.shape), value.dtype)

    def _group(self) -> dict[str, object]:
        return {
            "group_size": self.num_workers,
            "group_key": self._group_key,
            "communication_hint": "ring",  # the only implementation between CPUs
        }

    def _key(self, value: tf.Tensor) -> tf.Tensor:
        sizes = [tf.shape(value)[i] for i, known in enumerate(value.shape) if known is None]
        if not sizes:
            return tf.constant(next(self._fixed))
        return next(self._open) * _KEYS + functools.reduce(lambda a, b: 31 * a + b, sizes) % _PRIME

    def _taken(self, rows: tf.Tensor, order: list[int]) -> tf.Tensor:
        """Returns the rows [W, ...] in an order; with up to 10 workers, it changes nothing."""
        if self.num_workers <= 10:
            return rows
        return tf.gather(rows, order)


def _on_the_wire(value: tf.Tensor) -> tf.Tensor:
    """Converts a value, exactly, to one of the dtypes that the operations support."""
    if value.dtype in _KNOWN:
        return value
    if value.dtype == tf.string or value.dtype.is_complex:
        raise ValueError(
            f"several workers cannot exchange rows of {value.dtype.name}. Convert them to integers "
            "or floats in the model or its step."
        )
    if value.dtype.size < 4:
        return tf.cast(value, tf.float32 if value.dtype.is_floating else tf.int32)
    return tf.cast(value, tf.int64)
