"""Handles nested structures of tensors [n, ...], and their specs, which leave n open."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Union

import keras
import tensorflow as tf

from towers.machine.tensorflow_internals import NONE_SPEC
from towers.step.tensor_rows import is_scipy

# A dense, ragged or sparse tensor, or its spec or dtype. Or a list, tuple or dict of structures, as
# in `tf.nest`. None stands for an absent tensor. All tensors of a batch have the same n.
Structure: TypeAlias = Union[
    tf.Tensor, tf.RaggedTensor, tf.SparseTensor, Sequence["Structure"], Mapping[str, "Structure"],
    None,
]


def symbolic(spec: tf.TypeSpec) -> keras.KerasTensor:
    """Returns the symbolic Keras tensor of a spec."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return keras.KerasTensor(
            spec.shape, spec.dtype.name, ragged=True, ragged_rank=spec.ragged_rank,
            row_splits_dtype=spec.row_splits_dtype,
        )
    is_sparse = isinstance(spec, tf.SparseTensorSpec)
    return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=is_sparse)


def map_tensors(function: Callable[[tf.Tensor], Any], structure: Structure) -> Any:
    """Maps a function over tensors, like `tf.nest.map_structure`; None stands for an absent one."""
    return tf.nest.map_structure(lambda v: None if v is None else function(v), structure)


def batch_specs(batch: Any) -> Any:
    """Returns the specs of a batch's tensors, arrays or specs, for any number of examples.

    Absent parts become None: Keras' data has None or empty Optionals for them.
    """
    absent = (tf.experimental.Optional, tf.OptionalSpec, NONE_SPEC)
    return map_tensors(lambda v: None if isinstance(v, absent) else any_rows(v), batch)


def any_rows(value: Any) -> tf.TypeSpec:
    """Returns the spec of an array, a tensor or a spec [n, ...], for any n."""
    shape = [None, *tf.TensorShape(value.shape)[1:]]
    if isinstance(value, tf.RaggedTensor):
        value = tf.type_spec_from_value(value)
    if isinstance(value, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits_dtype)
    if isinstance(value, tf.SparseTensor | tf.SparseTensorSpec) or is_scipy(value):
        return tf.SparseTensorSpec(shape, value.dtype)
    return tf.TensorSpec(shape, value.dtype)


def one_row(batch: Any) -> Any:
    """Returns one row of zeros for each tensor, or spec, of a structure; None is kept."""

    def row_of(tensor: Any) -> Any:
        shape = [1, *(size or 1 for size in tensor.shape[1:])][:tensor.shape.rank]  # a scalar's: []
        row, spec = tf.zeros(shape, tensor.dtype), any_rows(tensor)
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.sparse.from_dense(row)
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_tensor(
                row, ragged_rank=spec.ragged_rank, row_splits_dtype=spec.row_splits_dtype
            )
        return row

    return map_tensors(row_of, batch)


def components(batch: Any) -> list[Any]:
    """Returns a structure's tensors or specs; splits ragged and sparse ones, leaves out None."""
    return [v for v in tf.nest.flatten(batch, expand_composites=True) if v is not None]


def packed(specs: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """Packs the next tensors, in the order of `components`, into a structure of these specs."""
    flat = tf.nest.flatten(specs, expand_composites=True)
    values = [None if spec is None else next(tensors) for spec in flat]
    return tf.nest.pack_sequence_as(specs, values, expand_composites=True)
