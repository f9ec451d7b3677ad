"""Takes, gathers and joins the rows of tensors [n, ...]: dense, ragged or sparse.

Other modules do not depend on the kind of tensor.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def as_tensor(value: Any) -> Any:
    """Converts an array, or a matrix of SciPy, to a tensor; returns any tensor unchanged."""
    if is_scipy(value):
        entries = value.tocoo()
        indices = np.stack([entries.row, entries.col], axis=1).astype(np.int64)
        return tf.sparse.reorder(tf.SparseTensor(indices, entries.data, entries.shape))
    return value if is_composite(value) else tf.convert_to_tensor(value)


def is_composite(value: Any) -> bool:
    """Whether a value, or its spec, is ragged or sparse, and so consists of several tensors."""
    kinds = tf.RaggedTensor | tf.RaggedTensorSpec | tf.SparseTensor | tf.SparseTensorSpec
    return isinstance(value, kinds)


def is_scipy(value: Any) -> bool:
    """Whether a value is a sparse matrix or array of SciPy; SciPy need not be installed."""
    return hasattr(value, "tocoo")


def take_rows(tensor: Any, begin: Any, end: Any) -> Any:
    """Returns rows begin ... end - 1 of a tensor [n, ...]; both bounds are [1], at most n."""
    if isinstance(tensor, tf.SparseTensor):
        begin, end = (tf.cast(bound, tf.int64) for bound in (begin, end))
        rows = tensor.indices[:, 0]
        taken = tf.where((rows >= begin) & (rows < end))[:, 0]
        indices, values = (tf.gather(v, taken) for v in (tensor.indices, tensor.values))
        return sparse_rows(tensor, indices[:, 0] - begin, indices, values, end - begin)
    if isinstance(tensor, tf.RaggedTensor):
        return tensor[begin[0]:end[0]]
    return tf.strided_slice(tensor, begin, end)


def gather_rows(tensor: Any, index: tf.Tensor) -> Any:
    """Returns the rows at `index`, [m] integers; a sparse tensor's entries must be sorted by row.
    """
    if not isinstance(tensor, tf.SparseTensor):
        return tf.gather(tensor, index)
    entries = tf.range(tf.size(tensor.values))
    by_row = tf.RaggedTensor.from_value_rowids(
        entries, tensor.indices[:, 0], tensor.dense_shape[0], validate=False
    )
    taken = tf.gather(by_row, index)
    indices, values = (tf.gather(v, taken.values) for v in (tensor.indices, tensor.values))
    return sparse_rows(tensor, taken.value_rowids(), indices, values, tf.shape(index, tf.int64))


def join_rows(tensors: Sequence[Any]) -> Any:
    """Concatenates the rows of several tensors [n, ...] of one kind."""
    if not isinstance(tensors[0], tf.SparseTensor):
        return tf.concat(list(tensors), axis=0)
    counts = tf.concat([v.dense_shape[:1] for v in tensors], axis=0)
    begins = tf.unstack(tf.cumsum(counts, exclusive=True))
    moved = [v.indices[:, 0] + begin for v, begin in zip(tensors, begins, strict=True)]
    parts = moved, [v.indices for v in tensors], [v.values for v in tensors]
    rows, indices, values = (tf.concat(part, axis=0) for part in parts)
    return sparse_rows(tensors[0], rows, indices, values, tf.reduce_sum(counts, keepdims=True))


def sparse_rows(
    like: tf.SparseTensor, rows: tf.Tensor, indices: tf.Tensor, values: tf.Tensor,
    num_rows: tf.Tensor,
) -> tf.SparseTensor:
    """Makes a sparse tensor from entries with new row numbers.

    Args:
        like: a tensor with the same shape except for the number of rows.
        rows: the new row of each entry, [m] int64.
        indices: [m, rank]; the first column is ignored. values: [m].
        num_rows: the new number of rows, [1] int64.
    """
    shape = tf.concat([num_rows, like.dense_shape[1:]], axis=0)
    tensor = tf.SparseTensor(
        tf.concat([rows[:, tf.newaxis], indices[:, 1:]], axis=1), values, shape
    )
    tensor.set_shape(tf.TensorShape([None]).concatenate(like.shape[1:]))  # unknown in a graph
    return tensor
