"""Structures of tensors [n, ...], and the specs that stand for them whatever n is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Union

import keras
import tensorflow as tf

from towers.machine.tensorflow_internals import NONE_SPEC
from towers.step.tensor_rows import is_scipy

# A tensor, ragged and sparse ones among them, or what stands for one (its spec, its dtype); lists,
# tuples and dicts of these, nested as `tf.nest` takes them; None for an absent one. A batch's
# tensors are [n, ...], of one n.
Structure: TypeAlias = Union[
    tf.Tensor, tf.RaggedTensor, tf.SparseTensor, Sequence["Structure"], Mapping[str, "Structure"],
    None,
]


def symbolic(spec: tf.TypeSpec) -> keras.KerasTensor:
    """The symbolic tensor that Keras builds a layer for."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return keras.KerasTensor(
            spec.shape, spec.dtype.name, ragged=True, ragged_rank=spec.ragged_rank,
            row_splits_dtype=spec.row_splits_dtype,
        )
    is_sparse = isinstance(spec, tf.SparseTensorSpec)
    return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=is_sparse)


def map_tensors(function: Callable[[tf.Tensor], Any], structure: Structure) -> Any:
    """Like `tf.nest.map_structure`, with None standing for an absent tensor."""
    return tf.nest.map_structure(lambda v: None if v is None else function(v), structure)


def batch_specs(batch: Any) -> Any:
    """The specs of a batch's tensors or arrays, or of their specs, for any number of examples.

    None for what is absent, as in Keras' data.
    """
    absent = (tf.experimental.Optional, tf.OptionalSpec, NONE_SPEC)
    return map_tensors(lambda v: None if isinstance(v, absent) else any_rows(v), batch)


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
    """Returns the tensors, or the specs, that a structure is made of; None is left out."""
    return [v for v in tf.nest.flatten(batch, expand_composites=True) if v is not None]


def packed(specs: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """A structure of these specs, of the next of some `components`."""
    flat = tf.nest.flatten(specs, expand_composites=True)
    values = [None if spec is None else next(tensors) for spec in flat]
    return tf.nest.pack_sequence_as(specs, values, expand_composites=True)
