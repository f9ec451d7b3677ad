"""Handles nested structures of tensors [n, ...]: their specs, which leave n open, and their rows.

Other modules do not depend on the kind of tensor: dense, ragged or sparse.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar, Union

import keras
import numpy as np
import tensorflow as tf

from towers.machine.tensorflow_internals import NONE_SPEC

# A tensor [n, ...] of any kind: dense, ragged or sparse.
BatchTensor: TypeAlias = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
# A tensor, or its spec or dtype. Or a list, tuple or dict of structures, as in `tf.nest`. None
# stands for an absent tensor. All tensors of a batch have the same n.
Structure: TypeAlias = Union[BatchTensor, Sequence["Structure"], Mapping[str, "Structure"], None]
_Structure = TypeVar("_Structure")  # a result has the structure of the argument

SPLIT, SUM = "split", "sum"  # scopes of operations, which --plan reads


def as_tensor(value: Any) -> BatchTensor:
    """Converts an array, or a matrix of SciPy, to a tensor; returns any tensor unchanged."""
    if is_scipy(value):
        entries = value.tocoo()
        indices = np.stack([entries.row, entries.col], axis=1).astype(np.int64)
        return tf.sparse.reorder(tf.SparseTensor(indices, entries.data, entries.shape))
    if is_composite(value):
        return value
    return tf.convert_to_tensor(value)


def is_composite(value: object) -> bool:
    """Whether a value, or its spec, is ragged or sparse, and so consists of several tensors."""
    kinds = tf.RaggedTensor | tf.RaggedTensorSpec | tf.SparseTensor | tf.SparseTensorSpec
    return isinstance(value, kinds)


def is_scipy(value: object) -> bool:
    """Whether a value is a sparse matrix or array of SciPy; SciPy need not be installed."""
    return hasattr(value, "tocoo")


def take_rows(tensor: BatchTensor, begin: tf.Tensor, end: tf.Tensor) -> BatchTensor:
    """Returns rows begin ... end - 1 of a tensor [n, ...]; both bounds are [1], at most n."""
    if isinstance(tensor, tf.SparseTensor):
        begin, end = (tf.cast(bound, tf.int64) for bound in (begin, end))
        rows = tensor.indices[:, 0]
        taken = tf.where((rows >= begin) & (rows < end))[:, 0]
        indices, values = (tf.gather(v, taken) for v in (tensor.indices, tensor.values))
        return sparse_rows(tensor, indices[:, 0] - begin, indices, values, end - begin)
    if isinstance(tensor, tf.RaggedTensor):
        return tensor[begin[0] : end[0]]
    return tf.strided_slice(tensor, begin, end)


def gather_rows(tensor: BatchTensor, index: tf.Tensor) -> BatchTensor:
    """Returns rows at `index`, [m] integers; a sparse tensor's entries must be sorted by row."""
    if not isinstance(tensor, tf.SparseTensor):
        return tf.gather(tensor, index)
    by_row = tf.RaggedTensor.from_value_rowids(
        tf.range(tf.size(tensor.values)),
        tensor.indices[:, 0],
        tensor.dense_shape[0],
        validate=False,
    )
    taken = tf.gather(by_row, index)
    indices, values = (tf.gather(v, taken.values) for v in (tensor.indices, tensor.values))
    return sparse_rows(tensor, taken.value_rowids(), indices, values, tf.shape(index, tf.int64))


def join_rows(tensors: Sequence[BatchTensor]) -> BatchTensor:
    """Concatenates the rows of several tensors [n, ...] of one kind."""
    if not isinstance(tensors[0], tf.SparseTensor):
        return tf.concat(list(tensors), axis=0)
    joined = tf.sparse.concat(0, list(tensors))
    joined.set_shape([None, *tensors[0].shape[1:]])  # unknown in a graph
    return joined


def sparse_rows(
    like: tf.SparseTensor,
    rows: tf.Tensor,
    indices: tf.Tensor,
    values: tf.Tensor,
    num_rows: tf.Tensor,
) -> tf.SparseTensor:
    """Makes a sparse tensor [num_rows, ...] from entries with new row numbers.

    like: gives the other axes. rows: [m] int64. indices: [m, rank], whose first column is ignored.
    values: [m]. num_rows: [1] int64.
    """
    shape = tf.concat([num_rows, like.dense_shape[1:]], axis=0)
    indices = tf.concat([rows[:, tf.newaxis], indices[:, 1:]], axis=1)
    tensor = tf.SparseTensor(indices, values, shape)
    tensor.set_shape(tf.TensorShape([None]).concatenate(like.shape[1:]))  # unknown in a graph
    return tensor


def symbolic(spec: tf.TypeSpec) -> keras.KerasTensor:
    """Returns the symbolic Keras tensor of a spec."""
    kind: dict[str, object] = {"sparse": isinstance(spec, tf.SparseTensorSpec)}
    if isinstance(spec, tf.RaggedTensorSpec):
        rank, splits = spec.ragged_rank, spec.row_splits_dtype
        kind = {"ragged": True, "ragged_rank": rank, "row_splits_dtype": splits}
    return keras.KerasTensor(spec.shape, spec.dtype.name, **kind)


def map_tensors(function: Callable[[tf.Tensor], object], structure: _Structure) -> _Structure:
    """Maps a function over tensors, like `tf.nest.map_structure`; None stands for an absent one."""
    return tf.nest.map_structure(lambda v: None if v is None else function(v), structure)


def batch_specs(batch: Structure) -> Structure:
    """Returns specs of a batch's tensors, arrays or specs, for any n; absent parts become None."""
    absent = (tf.experimental.Optional, tf.OptionalSpec, NONE_SPEC)
    return map_tensors(lambda v: None if isinstance(v, absent) else any_rows(v), batch)


def any_rows(value: BatchTensor | np.ndarray | tf.TypeSpec) -> tf.TypeSpec:
    """Returns the spec of an array, a tensor or a spec [n, ...], for any n."""
    shape = [None, *tf.TensorShape(value.shape)[1:]]
    if isinstance(value, tf.RaggedTensor):
        value = tf.type_spec_from_value(value)
    if isinstance(value, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits_dtype)
    if isinstance(value, tf.SparseTensor | tf.SparseTensorSpec) or is_scipy(value):
        return tf.SparseTensorSpec(shape, value.dtype)
    return tf.TensorSpec(shape, value.dtype)


def components(batch: Structure) -> list[tf.Tensor]:
    """Returns a structure's tensors or specs; splits ragged and sparse ones, leaves out None."""
    return [v for v in tf.nest.flatten(batch, expand_composites=True) if v is not None]


def packed(specs: _Structure, tensors: Iterator[tf.Tensor]) -> _Structure:
    """Packs the next tensors, in the order of `components`, into a structure of these specs."""
    flat = tf.nest.flatten(specs, expand_composites=True)
    values = [None if spec is None else next(tensors) for spec in flat]
    return tf.nest.pack_sequence_as(specs, values, expand_composites=True)


class RowComponents(NamedTuple):
    """Says what the `components` of a batch have of its n rows, by their index.

    dense: tensors [n, ...]. row_splits: where each ragged row begins, and where the last one ends,
        [n + 1]. dense_shapes: the shapes [n, ...] of sparse tensors, with what is known of them.
        of_entries: all components of ragged and sparse tensors.
    """

    dense: Sequence[int]
    row_splits: Sequence[int] = ()
    dense_shapes: Mapping[int, tf.TensorShape] = {}
    of_entries: Sequence[int] = ()

    def num_rows(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns n, scalar int32, of the components of a batch; 1 if nothing tells it."""
        if self.dense:
            return tf.shape(tensors[self.dense[0]])[0]
        if self.row_splits:
            return tf.shape(tensors[self.row_splits[0]])[0] - 1
        for i in self.dense_shapes:
            return tf.cast(tensors[i][0], tf.int32)
        return tf.constant(1)


def row_components(specs: Structure) -> RowComponents:
    """Returns what the `components` of a batch of these specs have of its rows."""
    dense: list[int] = []
    row_splits: list[int] = []
    of_entries: list[int] = []
    dense_shapes, place = {}, 0
    for spec in tf.nest.flatten(specs):
        if spec is None:
            continue
        parts = tf.nest.flatten(spec, expand_composites=True)
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            dense.append(place)
        if isinstance(spec, tf.RaggedTensorSpec):  # the values, then the splits of each axis
            row_splits.append(place + len(parts) - spec.ragged_rank)
        if isinstance(spec, tf.SparseTensorSpec) and spec.shape.rank:  # indices, values, the shape
            dense_shapes[place + 2] = spec.shape
        if is_composite(spec):
            of_entries += range(place, place + len(parts))
        place += len(parts)
    return RowComponents(dense, row_splits, dense_shapes, of_entries)
