"""Global batch -> shards: split in order, sizes differ by at most 1.

    global batch of 11, 4 towers   ->   [0 1 2] [3 4 5] [6 7 8] [9 10]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf


class Shard(NamedTuple):
    """One tower's part of the global batch.

    values: the batch's structure, each tensor [max(size, 1), ...].
    size: scalar int32, the examples that count. An empty shard (size 0) carries one row of the
        batch all the same, because a mean over nothing is NaN and some layers refuse an empty
        batch; its weight is 0.
    """

    values: Any
    size: tf.Tensor


def shard_sizes(num_examples: int, num_towers: int) -> list[int]:
    """How many examples each tower gets: the first `num_examples % num_towers` get one more."""
    quotient, remainder = divmod(num_examples, num_towers)
    return [quotient + (t < remainder) for t in range(num_towers)]


def shard_batch(batch: Any, num_towers: int) -> list[Shard]:
    """Splits a batch along its first axis.

    Args:
        batch: a structure of tensors [N, ...] with a common N >= 1, static or not; None stays.
        num_towers: T.

    Returns:
        T shards, in order.
    """
    num_examples = batch_size(batch)
    quotient, remainder = num_examples // num_towers, num_examples % num_towers
    shards = []
    for t in range(num_towers):
        size = quotient + tf.cast(t < remainder, tf.int32)
        begin = tf.minimum(t * quotient + tf.minimum(t, remainder), num_examples - 1)
        end = begin + tf.maximum(size, 1)
        values = map_tensors(lambda v: v[begin:end], batch)
        shards.append(Shard(values, size))
    return shards


def concat_shards(values: Sequence[tf.Tensor], shards: Sequence[Shard]) -> tf.Tensor:
    """Joins what the towers return for their shards, without the rows of empty shards.

    Args:
        values: T tensors [max(size, 1), ...].
        shards: the T shards that they come from.

    Returns:
        [N, ...], the rows in the order of the global batch.
    """
    return tf.concat([v[: s.size] for v, s in zip(values, shards, strict=True)], axis=0)


def shard_shares(shards: Sequence[Shard]) -> list[tf.Tensor]:
    """n_i / N, each shard's share of the examples: T scalars, float64."""
    sizes = tf.cast(tf.stack([s.size for s in shards]), tf.float64)
    return tf.unstack(sizes / tf.reduce_sum(sizes), num=len(shards))


def batch_size(batch: Any) -> tf.Tensor:
    """N, a scalar int32, of the first tensor of a batch."""
    first = next(v for v in tf.nest.flatten(batch) if v is not None)
    return tf.shape(first)[0]


def map_tensors(function: Any, structure: Any) -> Any:
    """Like `tf.nest.map_structure`, with None standing for an absent tensor."""
    return tf.nest.map_structure(lambda v: None if v is None else function(v), structure)
