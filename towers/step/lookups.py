"""Merges the towers' gradients of embedding tables, which have one slice for each lookup.

    embedding(tokens)        Indices come from the batch: the towers' slices are joined.
    embedding(tf.range(k))   All towers have equal indices: slice i of each tower is added.
    dense(sparse rows)       A shard has each index once: slices are joined, then added by index.

Keras' optimizers square each slice separately, so the slices must be the ones of the global batch.
The dense_shape marks the three kinds, because it survives a function call. It is None for the
second kind. For the third kind its dtype is `_BY_INDEX`, which TensorFlow itself never uses.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.machine.devices import HOST
from towers.step.loss_kinds import ShardFacts


_BY_INDEX = tf.int16
_DISTINCT = (
    "Unique", "UniqueV2", "SparseSegmentSumGradV2", "SparseSegmentMeanGradV2",
    "SparseSegmentSqrtNGradV2",
)
_MOVES = ("Reshape", "Identity", "Cast", "ExpandDims", "Squeeze")


def separate_lookups(gradient: Any, facts: ShardFacts) -> Any:
    """Marks the kinds of slices by their dense_shape, for `add_slices` and `join_lookups`.

    Several lookups give a tuple, unless all are of the first kind. Dense gradients do not change.
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


def _parts(values: tf.Tensor, indices: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Returns (values, indices) of each lookup; a tape may have joined several lookups."""
    if values.op.type == indices.op.type == "ConcatV2":
        of_values, of_indices = list(values.op.inputs)[:-1], list(indices.op.inputs)[:-1]
        if len(of_values) == len(of_indices):
            return [p for pair in zip(of_values, of_indices) for p in _parts(*pair)]
    return [(values, indices)]


def _are_shared(indices: tf.Tensor, facts: ShardFacts) -> bool:
    """Whether all towers look up equal indices, which depend on no row of the batch."""
    fact = facts.rows.fact(indices)
    counts_rows = fact.has_rows or fact.degree != 0
    return not counts_rows and not facts.dependence.local(indices, but_sizes=True)


def _are_distinct(indices: tf.Tensor) -> bool:
    """Whether each index occurs once, as in gradients of `tf.nn.embedding_lookup_sparse`."""
    while indices.op.type in _MOVES:
        indices = indices.op.inputs[0]
    return indices.op.type in _DISTINCT


def add_slices(left: Any, right: Any) -> Any:
    """Merges two towers' slices: adds the values if the indices are equal, else joins both."""
    if isinstance(left, tuple):
        return tuple(map(add_slices, left, right))
    if left.dense_shape is None:
        return tf.IndexedSlices(left.values + right.values, left.indices)
    return tf.IndexedSlices(
        tf.concat([left.values, right.values], 0), tf.concat([left.indices, right.indices], 0),
        left.dense_shape,
    )


def join_lookups(gradient: Any, shape: Sequence[int]) -> Any:
    """Converts a sum of marked slices to IndexedSlices of a table of this shape; keeps all else."""
    if not isinstance(gradient, tf.IndexedSlices | tuple):
        return gradient
    given = gradient if isinstance(gradient, tuple) else (gradient,)
    all_values, all_indices = [], []
    for part in given:
        values, indices, marked = part.values, part.indices, part.dense_shape
        if marked is not None and marked.dtype == _BY_INDEX:
            with tf.device(HOST):  # a GPU would add in any order
                indices, places = tf.unique(indices)
                values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
        elif marked is not None and len(given) == 1:
            return part
        all_values.append(values)
        all_indices.append(tf.cast(indices, given[0].indices.dtype))
    dense_shape = tf.constant(list(shape), tf.int64)
    return tf.IndexedSlices(tf.concat(all_values, 0), tf.concat(all_indices, 0), dense_shape)
