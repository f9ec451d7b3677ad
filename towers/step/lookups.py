"""Gradients of a table, one slice a lookup: lookups by a shard's rows, and lookups of all towers.

    embedding(tokens)        rows of the batch: the towers' slices are joined
    embedding(tf.range(k))   the same k in every tower: the towers' slices are added, one by one

Keras' optimizers square each slice by itself: what is one slice of the large batch has to be one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.levels.dependence import Dependence
from towers.rows.rows import Rows


def apart(gradients: Sequence[Any], is_shared: Callable[[tf.Tensor], bool]) -> list[Any]:
    """Takes the dense_shape off slices of lookups that all towers share: `add_slices` looks at it.

    A table that is looked up in both ways gives a tuple of two; what is no IndexedSlices stays.

    Args:
        gradients: a tower's gradients.
        is_shared: whether all towers have equal values of these indices.
    """
    return [_apart(gradient, is_shared) for gradient in gradients]


def _apart(gradient: Any, is_shared: Callable[[tf.Tensor], bool]) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    parts = [
        tf.IndexedSlices(values, indices, None if is_shared(indices) else gradient.dense_shape)
        for values, indices in _parts(gradient.values, gradient.indices)
    ]
    kinds = {part.dense_shape is None for part in parts}
    if kinds == {False}:
        return gradient
    return tuple(parts) if len(parts) > 1 else parts[0]


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


def whole(gradient: Any, shape: Sequence[int]) -> Any:
    """Joins what `apart` returned, and towers have added up, to one IndexedSlices again.

    Args:
        gradient: any gradient.
        shape: the shape of the table.
    """
    if isinstance(gradient, tf.IndexedSlices) and gradient.dense_shape is not None:
        return gradient
    if not isinstance(gradient, (tf.IndexedSlices, tuple)):
        return gradient
    parts = gradient if isinstance(gradient, tuple) else (gradient,)
    return tf.IndexedSlices(
        tf.concat([part.values for part in parts], axis=0),
        tf.concat([tf.cast(part.indices, parts[0].indices.dtype) for part in parts], axis=0),
        tf.constant(list(shape), tf.int64),
    )


def are_shared(indices: tf.Tensor, rows: Rows, dependence: Dependence) -> bool:
    """Whether all towers look up equal indices: no row of the batch has a part in them.

    Args:
        indices: the indices of a table's rows.
        rows, dependence: the facts of the trace.
    """
    fact = rows.fact(indices)
    counts_rows = fact.has_rows or fact.degree != 0
    return not counts_rows and not dependence.local(indices, but_sizes=True)


def _parts(values: tf.Tensor, indices: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """(values, indices) of each lookup, of slices that a tape may have joined from several."""
    if values.op.type == indices.op.type == "ConcatV2":
        of_values, of_indices = list(values.op.inputs)[:-1], list(indices.op.inputs)[:-1]
        if len(of_values) == len(of_indices):
            return [p for pair in zip(of_values, of_indices) for p in _parts(*pair)]
    return [(values, indices)]
