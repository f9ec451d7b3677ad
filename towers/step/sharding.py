"""Splits a global batch into shards, in order; their sizes differ by at most 1.

global batch of 11, 4 towers   ->   [0 1 2] [3 4 5] [6 7 8] [9 10]
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from towers.step.structures import BatchTensor, Structure, map_tensors, take_rows

BatchValues: TypeAlias = tuple[Structure, Structure, Structure]  # x, y, sample_weight
Placed: TypeAlias = Sequence[Structure] | None  # this worker's shards, if they are split already


class Shard(NamedTuple):
    """Holds one tower's part of the global batch.

    An empty shard (size 0) still carries one row, because a mean over no rows is NaN and some
    layers fail on an empty batch.
    """

    values: Structure  # the batch's structure, with tensors [max(size, 1), ...]
    size: tf.Tensor  # scalar int32, n_t, the number of examples


def shard_sizes(num_examples: int, num_towers: int) -> list[int]:
    """Returns each tower's number of examples; the first N % T towers get one more."""
    quotient, remainder = divmod(num_examples, num_towers)
    sizes = [quotient + (t < remainder) for t in range(num_towers)]
    assert sum(sizes) == num_examples and max(sizes) - min(sizes) <= 1
    return sizes


def shard_batch(batch: Structure, num_towers: int) -> list[Shard]:
    """Splits tensors [N, ...], N >= 1 static or not, into T shards, in order; None is kept."""
    num_examples = batch_size(batch)
    begins, ends, sizes = bounds(num_examples, num_towers)
    columns = begins[:, tf.newaxis], ends[:, tf.newaxis], sizes  # bounds are [1] each
    return [
        Shard(map_tensors(lambda v: take_rows(v, begin, end), batch), size)
        for begin, end, size in zip(*map(tf.unstack, columns), strict=True)
    ]


def rows_of_towers(num_towers: int, towers: range, num_examples: int | tf.Tensor) -> tf.Tensor:
    """Returns, bool [N], the rows in the shards of some of T towers; and the first of all rows."""
    begins, ends, _ = bounds(num_examples, num_towers)
    row = tf.range(num_examples)
    return (row == 0) | (row >= begins[towers.start]) & (row < ends[towers.stop - 1])


def bounds(
    num_examples: int | tf.Tensor, num_towers: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns each shard's first row, the row after its last one, and its size n_t; int32 [T]."""
    # Compute all bounds in few operations, because tracing an operation takes a millisecond.
    tower = tf.range(num_towers)
    quotient, remainder = num_examples // num_towers, num_examples % num_towers
    sizes = quotient + tf.cast(tower < remainder, tf.int32)
    begins = tf.minimum(tower * quotient + tf.minimum(tower, remainder), num_examples - 1)
    return begins, begins + tf.maximum(sizes, 1), sizes


def rows_of(value: BatchTensor, shard: Shard) -> BatchTensor:
    """Returns the rows of a tower's result, [max(size, 1), ...]; no row for an empty shard."""
    return take_rows(value, [0], [tf.where(shard.size > 0, batch_size(value), 0)])


def batch_size(batch: Structure) -> tf.Tensor:
    """Returns N, a batch's number of examples: scalar int32."""
    first = next(v for v in tf.nest.flatten(batch) if v is not None)
    return tf.cast(tf.shape(first)[0], tf.int32)  # ragged and sparse tensors give int64
