"""Gradients of a table, one slice a lookup: lookups by a shard's rows, and lookups of all towers.

    embedding(tokens)        rows of the batch: the towers' slices are joined
    embedding(tf.range(k))   the same k in every tower: the towers' slices are added, one by one
    dense(sparse rows)       each index once in a shard: slices are joined, and added by their index

Keras' optimizers square each slice by itself: what is one slice of the large batch has to be one.
The dense_shape tells the three kinds apart: it crosses a function's boundary. It is None for the
second kind. For the third kind its dtype is `_BY_INDEX`, which TensorFlow itself never uses.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.machine.devices import HOST
from towers.step.shard_facts import ShardFacts


def separate_lookups(gradient: Any, facts: ShardFacts) -> Any:
    """Tells the kinds of slices apart by their dense_shape, for `add_slices` and `join_lookups`.

    A table that is looked up in both ways gives a tuple of two; what is no IndexedSlices stays.

    Args:
        gradient: a tower's gradient of one variable.
        facts: of the trace.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    found = _parts(gradient.values, gradient.indices)
    shape = gradient.dense_shape
    shapes = [
        None if _are_shared(indices, facts)
        else tf.cast(shape, _BY_INDEX) if _are_distinct(indices) else shape
        for _, indices in found
    ]
    if all(each is shape for each in shapes):
        return gradient
    parts = tuple(tf.IndexedSlices(*v, each) for v, each in zip(found, shapes, strict=True))
    return parts if len(parts) > 1 else parts[0]


def _are_distinct(indices: tf.Tensor) -> bool:
    """Whether a shard has each index once, as in gradients of `tf.nn.embedding_lookup_sparse`."""
    while indices.op.type in _MOVES:
        indices = indices.op.inputs[0]
    return indices.op.type in _DISTINCT


_BY_INDEX = tf.int16
_DISTINCT = (
    "Unique", "UniqueV2", "SparseSegmentSumGradV2", "SparseSegmentMeanGradV2",
    "SparseSegmentSqrtNGradV2",
)
_MOVES = ("Reshape", "Identity", "Cast", "ExpandDims", "Squeeze")


def add_slices(left: Any, right: Any) -> Any:
    """The sum of two towers' slices: values are added where both share the indices, else joined."""
    if isinstance(left, tuple):
        return tuple(map(add_slices, left, right))
    if left.dense_shape is None:
        return tf.IndexedSlices(left.values + right.values, left.indices)
    return tf.IndexedSlices(
        tf.concat([left.values, right.values], axis=0),
        tf.concat([left.indices, right.indices], axis=0),
        left.dense_shape,
    )


def join_lookups(gradient: Any, shape: Sequence[int]) -> Any:
    """Joins what `separate_lookups` returned, and towers have added up, to one IndexedSlices again.

    Args:
        gradient: any gradient.
        shape: the shape of the table.
    """
    if not isinstance(gradient, (tf.IndexedSlices, tuple)):
        return gradient
    given = gradient if isinstance(gradient, tuple) else (gradient,)
    shapes = [part.dense_shape for part in given]
    if len(given) == 1 and shapes[0] is not None and shapes[0].dtype != _BY_INDEX:
        return given[0]
    parts = [
        _added_by_index(part) if shape is not None and shape.dtype == _BY_INDEX
        else (part.values, part.indices)
        for part, shape in zip(given, shapes, strict=True)
    ]
    return tf.IndexedSlices(
        tf.concat([values for values, _ in parts], axis=0),
        tf.concat([tf.cast(indices, given[0].indices.dtype) for _, indices in parts], axis=0),
        tf.constant(list(shape), tf.int64),
    )


def _added_by_index(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """Values and indices, each index once, in the order of the rows; a GPU would add in any order.
    """
    with tf.device(HOST):
        indices, places = tf.unique(slices.indices)
        return tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices)), indices


def _are_shared(indices: tf.Tensor, facts: ShardFacts) -> bool:
    """Whether all towers look up equal indices: no row of the batch has a part in them."""
    fact = facts.rows.fact(indices)
    counts_rows = fact.has_rows or fact.degree != 0
    return not counts_rows and not facts.dependence.local(indices, but_sizes=True)


def _parts(values: tf.Tensor, indices: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """(values, indices) of each lookup, of slices that a tape may have joined from several."""
    if values.op.type == indices.op.type == "ConcatV2":
        of_values, of_indices = list(values.op.inputs)[:-1], list(indices.op.inputs)[:-1]
        if len(of_values) == len(of_indices):
            return [p for pair in zip(of_values, of_indices) for p in _parts(*pair)]
    return [(values, indices)]
