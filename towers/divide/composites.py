"""Rules of ragged and sparse tensors, whose entries are there once.

    entries  -->  a dense tensor, or a product    in every tower, from the entries in its rows
             -->  a lookup, and sums by row       once; if no row is empty, there are as many sums
                                                  as rows, and towers share the products behind

TensorFlow's shape inference knows nothing of these results.
"""

import numpy as np
import tensorflow as tf

from towers.divide.context import Context
from towers.divide.facts import (
    ONCE, OWN, PART, WHOLE, Each, Op, Shapes, Tensors, rows,
)  # fmt: skip
from towers.divide.probes import Dim, is_fixed, rows_each
from towers.divide.rule import FIRST, Look, rule
from towers.divide.tables import TABLES
from towers.step.structures import take_rows

# Sums by row, and which input has the number of the row. TensorFlow makes as many as the last one.
_SUMS_BY_ROW = {
    "SegmentSum": 1, "SegmentMean": 1, "SparseSegmentSum": 2, "SparseSegmentMean": 2,
    "SparseSegmentSqrtN": 2,
}  # fmt: skip


@rule("RaggedTensorToTensor", table=TABLES)
def padded(look: Look) -> Each | None:
    """Pads a tower's ragged rows, like the batch's: to its longest row, or a given length."""
    wanted, rank, row_splits = look.const(0), look.outputs[0].shape.rank, look.dims(-1)
    if look.attr("row_partition_types") != [b"ROW_SPLITS"] or None in (rank, row_splits):
        return None
    counts = tuple(size - 1 for size in row_splits[0])
    if rows_each(counts) != 1 or wanted is None:
        return None
    size, length, *others = np.broadcast_to(wanted, [rank])  # -1 is open
    lengths = look.probes.open_sizes() if length == -1 else [length] * len(counts)
    if size != -1 or lengths is None:
        return None

    def pad(context: Context, op: Op, values: Tensors) -> Tensors:
        shape, entries, default, splits = values
        longest = tf.reduce_max(tf.concat([splits[1:] - splits[:-1], [0]], axis=0))
        sizes = [-1, longest if length == -1 else length, *others]
        shape = tf.stack([tf.cast(size, shape.dtype) for size in sizes])
        own = splits[context.place.start : context.place.start + context.place.count + 1]
        return context.copy(op, [shape, entries[own[0] : own[-1]], default, own - own[0]])

    shapes = [[n, m, *look.outputs[0].shape[2:]] for n, m in zip(counts, lengths, strict=True)]
    return look.each([WHOLE] * len(look.inputs), FIRST, emit=pad, shapes=[shapes])


@rule("SparseToDense", table=TABLES)
def densified(look: Look) -> Each | None:
    """Makes a tower's dense rows of the entries in them."""
    sizes = _sizes_of_rows(look, 1)
    indices, _, entries, _ = (value.shape.rank for value in look.inputs)
    if sizes is None or (indices, entries) != (2, 1) or look.inputs[0].dtype != tf.int64:
        return None

    def make(context: Context, op: Op, values: Tensors) -> Tensors:
        indices, shape, entries, default = values
        own = _own_entries(context, indices, entries, shape)
        return context.copy(op, [own.indices, own.dense_shape, own.values, default])

    return look.each([WHOLE] * 4, FIRST, emit=make, shapes=[list(zip(*sizes))])


@rule("SparseTensorDenseMatMul", table=TABLES)
def sparse_product(look: Look) -> Each | None:
    """Multiplies a tower's sparse rows; transposed, adds up the products with its dense rows."""
    sizes, dims, is_transposed = _sizes_of_rows(look, 2), look.dims(3), look.attr("adjoint_b")
    if sizes is None or dims is None:
        return None
    if not look.attr("adjoint_a"):
        need, fact, size, is_divided = WHOLE, FIRST, sizes[0], look.fact(3) == ONCE
    else:
        axis = 1 if is_transposed else 0
        need, fact, size, is_divided = OWN, PART, sizes[1], look.fact(3) == rows(axis)
    if not is_divided:
        return None

    def multiply(context: Context, op: Op, values: Tensors) -> Tensors:
        own = _own_entries(context, *values[:3])
        return context.copy(op, [own.indices, own.values, own.dense_shape, values[3]])

    width = dims[0 if is_transposed else 1]
    needs = [WHOLE, WHOLE, WHOLE, need]
    return look.each(needs, fact, emit=multiply, shapes=[list(zip(size, width))])


def _sizes_of_rows(look: Look, i: int) -> list[Dim] | None:
    """Returns the sizes in an input that is a shape [n, ...], if only the first counts rows."""
    found = look.values(i)
    sizes = None if found is None else [tuple(map(int, each)) for each in zip(*found)]
    if not sizes or rows_each(sizes[0]) != 1 or not all(map(is_fixed, sizes[1:])):
        return None
    return sizes


def _own_entries(
    context: Context, indices: tf.Tensor, values: tf.Tensor, shape: tf.Tensor
) -> tf.SparseTensor:
    """Returns a tower's rows of a sparse tensor."""
    begin, count = (tf.cast([n], tf.int64) for n in (context.place.start, context.place.count))
    return take_rows(tf.SparseTensor(indices, values, shape), begin, begin + count)


def fills_or_sums(op: Op) -> bool:
    """Returns whether `shapes_of_all` knows a number of rows that TensorFlow does not."""
    return _fill_before(op) is not None


def shapes_of_all(look: Look) -> list[Shapes | None]:
    """Returns the shapes at the probes of the results of what runs once; None is unknown.

    After empty rows have been filled, each row has an entry, and so a sum. Keras' Dense fills them.
    """
    shapes: list[Shapes | None] = [None] * len(look.outputs)
    fill = _fill_before(look.op)
    found = look.probes.values(fill.inputs[2]) if fill is not None else None
    if found is None:
        return shapes
    counts = [int(shape[0]) for shape in found]
    if look.op is fill:  # filled indices and entries, which rows were empty, where entries were
        shapes[2] = [[count] for count in counts]
    elif look.outputs[0].shape.rank is not None:
        shapes[0] = [[count, *look.outputs[0].shape[1:]] for count in counts]
    return shapes


def _fill_before(op: Op) -> Op | None:
    """Returns what has filled the empty rows of what an operation sums by row, or fills itself."""
    if op.type not in _SUMS_BY_ROW:
        return op if op.type == "SparseFillEmptyRows" else None
    made = op.inputs[_SUMS_BY_ROW[op.type]].op
    while made.type in ("Cast", "Identity"):
        made = made.inputs[0].op
    if made.type == "StridedSlice" and _takes_first_column(made):  # the row of each entry
        made = made.inputs[0].op
        if made.type == "SparseFillEmptyRows":
            return made
    return None


def _takes_first_column(op: Op) -> bool:
    """Returns whether an operation takes x[:, 0] of a matrix."""
    masks = ("begin_mask", "end_mask", "shrink_axis_mask", "new_axis_mask", "ellipsis_mask")
    begin, strides = (tf.get_static_value(op.source.inputs[i]) for i in (1, 3))
    is_column = [op.source.get_attr(mask) for mask in masks] == [0b01, 0b01, 0b10, 0, 0]
    return is_column and begin is not None and begin[1] == 0 and list(strides) == [1, 1]
