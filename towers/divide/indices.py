"""Rules of indices into their own row, whichever row that is.

    x[range(n), labels] by tf.gather_nd        an index begins with the number of its row
    a lookup in a flat tensor                  row * k + a number below k
    gradients of tf.sort, tf.math.top_k and tf.gather(..., batch_dims=1)

A tower subtracts the place of its first row.
"""

import functools
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.divide.context import Context
from towers.divide.facts import (
    ONCE,
    OWN,
    PART,
    WHOLE,
    Each,
    Op,
    Tensors,
    Value,
    rows,
    rows_of,
    shape_of,
)
from towers.divide.probes import ROWS, Dim, Probes, is_rows, rows_each
from towers.divide.rule import FIRST, Look, rule, rule_of_rows

_KEEP = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze")  # all numbers, in their order


class _Span(NamedTuple):
    """Says where integers lie, at each probe: in row r, from r * step to r * step + size - 1.

    The rows follow each other in the order of the flat tensor.
    """

    step: np.ndarray
    size: np.ndarray


@rule_of_rows("UnsortedSegmentSum")
def segments(look: Look) -> Each | None:
    """Sums rows to segments that are numbered, as the gradient of a lookup does."""
    axis, counts, rank = look.fact(0).axis, look.values(2), len(look.dims(1))
    if axis >= rank:  # the segments are of other axes
        return look.each([OWN, WHOLE, WHOLE], rows(axis - rank + 1))
    if (
        counts is None
        or look.fact(0) != FIRST
        or not _is_in_row(look, 1, look.inputs[1], tuple(map(int, counts)))
    ):
        return look.each([OWN, rows_of(axis), WHOLE], PART)

    def add(context: Context, op: Op, values: Tensors) -> Tensors:
        data, numbers, count = values
        each = tf.cast(count, tf.int32) // context.place.total
        own = each * context.place.count
        first = _first(context, own, numbers.dtype)
        return context.copy(op, [data, numbers - first, tf.cast(own, count.dtype)])

    return look.each([OWN, rows_of(0), WHOLE], FIRST, emit=add)


def joined_segments(look: Look) -> Each | None:
    """Sums several groups of rows to one set of segments, one group after the other.

    The gradient of a table that is looked up twice joins the rows of both lookups.
    """
    if look.type != "UnsortedSegmentSum":
        return None
    data, segment_ids = (value.op for value in look.inputs[:2])
    if {data.type, segment_ids.type} != {"ConcatV2"}:
        return None
    (*groups, axis), (*ids, of_ids) = data.inputs, segment_ids.inputs
    # Joined along axis 0, the rows of the towers would be in another order than in the batch.
    # A sum over segments does not depend on it, so each tower adds its rows of each group.
    known = [look.probes.const(value) for value in (axis, of_ids)]
    if any(value is None or int(value) != 0 for value in known) or len(groups) != len(ids):
        return None
    for group, its_ids in zip(groups, ids, strict=True):
        sizes = [look.probes.dims(value) for value in (group, its_ids)]
        if {group.fact, its_ids.fact} != {rows(0)} or sizes[0] is None or sizes[1] is None:
            return None
        if tuple(sizes[0][0]) != tuple(sizes[1][0]):
            return None

    def emit(context: Context, op: Op, given: Tensors) -> Tensors:
        *both, count = given
        pairs = zip(both[: len(groups)], both[len(groups) :], strict=True)
        sums = [context.copy(op, [*pair, count])[0] for pair in pairs]
        return [functools.reduce(tf.add, sums)]

    needs = [*((value, OWN) for value in (*groups, *ids)), (look.inputs[2], WHOLE)]
    return Each(needs, [PART], emit)


@rule("GatherV2")
def gather(look: Look) -> Each | None:
    """Looks rows of indices up in a table, or chooses within rows.

    A table with rows is looked up once, because towers would need all of it.
    """
    table, indices, batch = look.fact(0), look.fact(1), look.attr("batch_dims")
    if table == PART and indices == ONCE:
        return look.each([OWN, WHOLE, WHOLE], PART)
    axis = int(look.const(2)) % len(look.dims(0))
    if axis == batch == 0 and _is_in_row(look, 1, look.inputs[1], look.dims(0)[0]):
        return look.each([rows_of(0), rows_of(0), WHOLE], FIRST, emit=_look_up)
    if batch:
        # Table and indices share their first axes. Rows must lie along one of them.
        of_rows = next((f.axis for f in (table, indices) if f.kind == "rows"), batch)
        if of_rows >= batch:
            return None
        look.inputs[1].below = look.dims(0)[axis]
        return look.each([rows_of(of_rows), rows_of(of_rows), WHOLE], rows(of_rows))
    if table == ONCE and indices.kind == "rows":
        return look.each([WHOLE, OWN, WHOLE], rows(axis + indices.axis))
    if table.kind == "rows" and table.axis != axis and indices.kind != "rows":
        # The axes of the indices take the place of the axis that is looked up.
        moved_by = len(look.dims(1)) - 1 if table.axis > axis else 0
        return look.each([OWN, WHOLE, WHOLE], rows(table.axis + moved_by))
    return None


def _look_up(context: Context, op: Op, values: Tensors) -> Tensors:
    """Looks a tower's indices up in its own rows of the table."""
    table, indices, axis = values
    first = _first(context, tf.shape(table)[0], indices.dtype)
    return context.copy(op, [table, indices - first, axis])


@rule(
    "GatherNd", "TensorScatterAdd", "TensorScatterMax", "TensorScatterMin", "TensorScatterSub",
    "TensorScatterUpdate",
)  # fmt: skip
def at_indices(look: Look) -> Each | None:
    """Looks rows of indices up in a table, or reads or changes a tensor within the rows.

    The last axis of the indices counts no rows.
    """
    if look.type == "GatherNd" and look.fact(0) == ONCE and look.fact(1).kind == "rows":
        return look.each([WHOLE, OWN], look.fact(1))
    if not _begins_with_row(look, 1, look.dims(0)):
        return None

    def emit(context: Context, op: Op, values: Tensors) -> Tensors:
        table, indices, *updates = values
        return context.copy(op, [table, _own(context, indices, tf.shape(table)), *updates])

    return look.each([rows_of(0) for _ in look.inputs], FIRST, emit=emit)


@rule("ScatterNd")
def scatter(look: Look) -> Each | None:
    """Adds updates to zeros, within the rows."""
    if not _begins_with_row(look, 0, look.out()):
        return None

    def emit(context: Context, op: Op, values: Tensors) -> Tensors:
        indices, updates, shape = values
        return context.copy(op, [_own(context, indices, shape), updates, shape])

    return look.each([rows_of(0), rows_of(0), shape_of(0)], FIRST, emit=emit)


def _own(context: Context, indices: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Returns a tower's indices into its own rows, of this shape."""
    first = _first(context, tf.cast(shape[0], tf.int32), indices.dtype)
    return indices - tf.one_hot(0, tf.shape(indices)[-1], first, 0, dtype=indices.dtype)


def _first(context: Context, size: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the place of a tower's first row, if all its rows have this size."""
    each = size // tf.maximum(context.place.count, 1)
    return tf.cast(each * context.place.start, dtype)


def _begins_with_row(look: Look, i: int, dims: list[Dim]) -> bool:
    """Returns whether each index in an input begins with a place in its row of these sizes."""
    value = look.inputs[i]
    if set(look.dims(i)[-1]) != {1}:  # several numbers in an index
        last = len(look.dims(i)) - 1
        if value.op.type != "Pack" or value.op.source.get_attr("axis") % (last + 1) != last:
            return False
        value = value.op.inputs[0]
    return _is_in_row(look, i, value, dims[0])


def _is_in_row(look: Look, i: int, value: Value, dim: Dim) -> bool:
    """Returns whether integers of an input lie in their own row, if all rows have this size."""
    if not is_rows(dim) or look.fact(i) not in (FIRST, ONCE) or not is_rows(look.dims(i)[0]):
        return False
    span, each = _span(look.probes, value), np.floor_divide(dim, ROWS)
    if span is None or not np.array_equal(span.step, each):
        return False
    # A size that is open may be smaller than at the probes: only an equal one is known to fit.
    is_fixed = len({*span.size}) == len({*each}) == 1
    return np.array_equal(span.size, each) or is_fixed and span.size[0] <= each[0]


def _span(probes: Probes, value: Value) -> _Span | None:
    """Returns where integers lie, as far as their operations tell."""
    op = value.op
    if value.dtype not in (tf.int32, tf.int64):  # smaller ones begin again at 0
        return None
    if value.below is not None:
        return _Span(np.zeros(len(ROWS), int), np.array(value.below))
    if op.type == "Range":
        return _of_range(probes, op)
    if op.type in _KEEP or op.type == "StridedSlice" and _has_all(probes, op):
        return _span(probes, op.inputs[0])
    if op.type == "Mul":
        return _product(probes, *op.inputs)
    if op.type in ("BroadcastTo", "Tile"):
        return _broadcast(probes, op.inputs[0], value)
    if op.type == "AddV2":
        first, second = (_broadcast(probes, term, value) for term in op.inputs)
        if first is not None and second is not None:
            return _Span(first.step + second.step, first.size + second.size - 1)
    return None


def _of_range(probes: Probes, op: Op) -> _Span | None:
    """Returns where the numbers of a range from 0 on lie."""
    dims = probes.dims(op.outputs[0])
    start, _, step = (probes.const(value) for value in op.inputs)
    if dims is None or start != 0 or step is None or step < 0:
        return None
    each = rows_each(dims[0])
    if each is None:
        return _Span(np.zeros(len(ROWS), int), step * (np.array(dims[0]) - 1) + 1)
    return _Span(np.full(len(ROWS), step * each), np.full(len(ROWS), step * (each - 1) + 1))


def _has_all(probes: Probes, op: Op) -> bool:
    """Returns whether a slice, such as x[:, None], has all numbers in their order."""
    before, after = probes.dims(op.inputs[0]), probes.dims(op.outputs[0])
    steps = probes.const(op.inputs[3])
    if before is None or after is None or steps is None:
        return False
    has_all = np.array_equal(np.prod(before, axis=0), np.prod(after, axis=0))
    return has_all and bool(np.all(steps > 0))


def _product(probes: Probes, first: Value, second: Value) -> _Span | None:
    """Returns where integers lie that are multiplied by a number."""
    for value, factor in ((first, second), (second, first)):
        numbers, span = probes.values(factor), _span(probes, value)
        if span is not None and numbers is not None and all(n.ndim == 0 <= n for n in numbers):
            factors = np.array(numbers)
            return _Span(span.step * factors, (span.size - 1) * factors + 1)
    return None


def _broadcast(probes: Probes, value: Value, result: Value) -> _Span | None:
    """Returns where integers lie that a result repeats; rows must stay along the first axis."""
    span, before, after = _span(probes, value), probes.dims(value), probes.dims(result)
    if span is None or not span.step.any():
        return span
    if not before or not after or len(before) != len(after):
        return None
    return span if is_rows(before[0]) and before[0] == after[0] else None
