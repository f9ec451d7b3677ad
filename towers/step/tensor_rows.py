"""The rows of a tensor [n, ...]: dense, ragged or sparse.

No other module knows how the rows of each kind are taken, chosen and joined.
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
    """Whether a value, or its spec, is ragged or sparse: several tensors make one."""
    kinds = tf.RaggedTensor | tf.RaggedTensorSpec | tf.SparseTensor | tf.SparseTensorSpec
    return isinstance(value, kinds)


def is_scipy(value: Any) -> bool:
    """Whether a value is a sparse matrix or array of SciPy, which may be absent."""
    return hasattr(value, "tocoo")


def take_rows(tensor: Any, begin: Any, end: Any) -> Any:
    """The rows begin ... end - 1 of a tensor [n, ...]; both are [1], and no more than n."""
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
    """The rows of these places, [m] of integers; a sparse tensor must be in the order of its rows.
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
    """The rows of several tensors [n, ...] of one kind, one after another."""
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
    """Makes a sparse tensor of entries that get other rows.

    Args:
        like: a tensor with the same shape but for the number of rows.
        rows: the row of each entry, [m] int64.
        indices: [m, rank], of which the first column does not count. values: [m].
        num_rows: [1] int64.
    """
    shape = tf.concat([num_rows, like.dense_shape[1:]], axis=0)
    tensor = tf.SparseTensor(
        tf.concat([rows[:, tf.newaxis], indices[:, 1:]], axis=1), values, shape
    )
    tensor.set_shape(tf.TensorShape([None]).concatenate(like.shape[1:]))  # a graph forgets it
    return tensor
