"""Global batch -> shards: split in order, sizes differ by at most 1.

    global batch of 11, 4 towers   ->   [0 1 2] [3 4 5] [6 7 8] [9 10]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

# (x, y, sample_weight): structures of tensors [n, ...], or None.
BatchValues: TypeAlias = tuple[Any, Any, Any]
Placed: TypeAlias = Sequence[BatchValues] | None  # the T shards, where they have been split already


class Shard(NamedTuple):
    """One tower's part of the global batch.

    values: the batch's structure, each tensor [max(size, 1), ...].
    size: scalar int32, the examples that count. An empty shard (size 0) carries one row of the
        batch all the same, because a mean over nothing is NaN and some layers refuse an empty
        batch; its share is 0.
    share: scalar float64, n_t / N.
    """

    values: Any
    size: tf.Tensor
    share: tf.Tensor


def shard_sizes(num_examples: int, num_towers: int) -> list[int]:
    """How many examples each tower gets: the first `num_examples % num_towers` get one more."""
    quotient, remainder = divmod(num_examples, num_towers)
    return [quotient + (t < remainder) for t in range(num_towers)]


def shard_batch(
    batch: Any, num_towers: int, placed: Sequence[Any] | None = None
) -> list[Shard]:
    """Splits a batch along its first axis.

    Args:
        batch: a structure of tensors [N, ...] with a common N >= 1, static or not; None stays.
        num_towers: T.
        placed: the T shards' values, where they have been split already.

    Returns:
        T shards, in order.
    """
    num_examples = batch_size(batch)
    quotient, remainder = num_examples // num_towers, num_examples % num_towers
    shards = []
    for t in range(num_towers):
        size = quotient + tf.cast(t < remainder, tf.int32)
        begin = tf.minimum(t * quotient + tf.minimum(t, remainder), num_examples - 1)
        values = _rows(batch, begin, size) if placed is None else placed[t]
        share = tf.cast(size, tf.float64) / tf.cast(num_examples, tf.float64)
        shards.append(Shard(values, size, share))
    return shards


def _rows(batch: Any, begin: tf.Tensor, size: tf.Tensor) -> Any:
    """The rows of a shard, at least one."""
    end = begin + tf.maximum(size, 1)
    return map_tensors(lambda v: v[begin:end], batch)


def concat_shards(values: Sequence[tf.Tensor], shards: Sequence[Shard]) -> tf.Tensor:
    """Joins what the towers return for their shards, without the rows of empty shards.

    Args:
        values: T tensors [max(size, 1), ...].
        shards: the T shards that they come from.

    Returns:
        [N, ...], the rows in the order of the global batch.
    """
    return tf.concat([v[: s.size] for v, s in zip(values, shards, strict=True)], axis=0)


def batch_size(batch: Any) -> tf.Tensor:
    """N, a scalar int32, of the first tensor of a batch."""
    first = next(v for v in tf.nest.flatten(batch) if v is not None)
    return tf.shape(first)[0]


def map_tensors(function: Any, structure: Any) -> Any:
    """Like `tf.nest.map_structure`, with None standing for an absent tensor."""
    return tf.nest.map_structure(lambda v: None if v is None else function(v), structure)


def batch_specs(batch: Any) -> Any:
    """The specs of a batch's tensors or arrays, or of their specs, for any number of examples.

    None for what is absent, as in Keras' data.
    """
    return tf.nest.map_structure(_batch_spec, batch)


def _batch_spec(value: Any) -> tf.TensorSpec | None:
    if value is None or isinstance(value, tf.OptionalSpec):
        return None
    return tf.TensorSpec([None, *tf.TensorShape(value.shape)[1:]], value.dtype)
