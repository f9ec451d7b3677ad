"""Structures of tensors [n, ...], and the specs that stand for them whatever n is.

A tensor is dense, ragged or sparse. This module alone knows how the rows of each kind are taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Union

import keras
import numpy as np
import tensorflow as tf

from towers.machine.tensorflow_internals import NONE_SPEC

# A tensor, ragged and sparse ones among them, or what stands for one (its spec, its dtype); lists,
# tuples and dicts of these, nested as `tf.nest` takes them; None for an absent one. A batch's
# tensors are [n, ...], of one n.
Structure: TypeAlias = Union[
    tf.Tensor, tf.RaggedTensor, tf.SparseTensor, Sequence["Structure"], Mapping[str, "Structure"],
    None,
]


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


def symbolic(spec: tf.TypeSpec) -> keras.KerasTensor:
    """The symbolic tensor that Keras builds a layer for."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return keras.KerasTensor(
            spec.shape, spec.dtype.name, ragged=True, ragged_rank=spec.ragged_rank,
            row_splits_dtype=spec.row_splits_dtype,
        )
    is_sparse = isinstance(spec, tf.SparseTensorSpec)
    return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=is_sparse)


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


def map_tensors(function: Callable[[tf.Tensor], Any], structure: Structure) -> Any:
    """Like `tf.nest.map_structure`, with None standing for an absent tensor."""
    return tf.nest.map_structure(lambda v: None if v is None else function(v), structure)


def batch_specs(batch: Any) -> Any:
    """The specs of a batch's tensors or arrays, or of their specs, for any number of examples.

    None for what is absent, as in Keras' data.
    """
    return tf.nest.map_structure(_batch_spec, batch)


_ABSENT = (tf.experimental.Optional, tf.OptionalSpec, NONE_SPEC)


def _batch_spec(value: Any) -> tf.TypeSpec | None:
    return None if value is None or isinstance(value, _ABSENT) else any_rows(value)


def any_rows(value: Any) -> tf.TypeSpec:
    """The spec of an array, a tensor or a spec [n, ...], for any n."""
    shape = [None, *tf.TensorShape(value.shape)[1:]]
    if isinstance(value, tf.RaggedTensor):
        value = tf.type_spec_from_value(value)
    if isinstance(value, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits_dtype)
    if isinstance(value, tf.SparseTensor | tf.SparseTensorSpec) or is_scipy(value):
        return tf.SparseTensorSpec(shape, value.dtype)
    return tf.TensorSpec(shape, value.dtype)


def one_row(batch: Any) -> Any:
    """One row of zeros for each tensor, or spec, of a structure; None for what is absent."""
    return map_tensors(
        lambda v: tf.zeros([1, *(size or 1 for size in v.shape[1:])], v.dtype), batch
    )


def components(batch: Any) -> list[Any]:
    """Returns the tensors, or the specs, that a structure is made of; None is left out."""
    return [v for v in tf.nest.flatten(batch, expand_composites=True) if v is not None]


def packed(specs: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """A structure of these specs, of the next of some `components`."""
    flat = tf.nest.flatten(specs, expand_composites=True)
    values = [None if spec is None else next(tensors) for spec in flat]
    return tf.nest.pack_sequence_as(specs, values, expand_composites=True)
