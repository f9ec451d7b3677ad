"""Holds the rules of operations that take or write rows by an index: slices, gathers and lists.

Loops read and write rows in lists. The fact of a list describes its tensors, stacked along a new
first axis. In a list of rows, axis 0 is the batch axis. In a list of whole batches, it is axis 1.
"""

from dataclasses import replace
from typing import Any

import tensorflow as tf

from towers.graph.elements import row_by_row
from towers.graph.facts import (
    COMPARES, EACH_ROW, MIXES, PLACE, SHARED, UNKNOWN, Fact, Op, axis_like, first_fault, open_axis,
    sizes,
)
from towers.machine.user_lines import is_of_tensorflow


def slice_along(op: Op, axis: int) -> tuple[Any, Any, Any, bool]:
    """Returns begin, end and step of a Slice or StridedSlice along an axis of its input.

    A bound is None if it is left out, an int, or a Fact if it is not constant. The last result
    says whether begin is an index, which removes the axis.
    """

    def bound(index: int, place: int) -> Any:
        values, parts = tf.get_static_value(op.inputs[index], True), op.facts[index].parts
        value = None if values is None else values.reshape(-1)[place]
        if value is not None:
            return int(value)
        return parts[place] if place < len(parts) else Fact(degree=None)

    if op.type == "Slice":
        begin, end = bound(1, axis), bound(2, axis)
        if begin != 0 and end != -1:
            are_known = isinstance(begin, int) and isinstance(end, int)
            end = begin + end if are_known else Fact(degree=None)
        return begin, None if end == -1 else end, 1, False

    def masks(name: str, place: int) -> bool:
        return bool(op.operation.get_attr(f"{name}_mask") >> place & 1)

    count, rank = op.inputs[1].shape[0] or 1, op.inputs[0].shape.rank or 0
    num_new = sum(masks("new_axis", i) for i in range(count))
    places: list[int | None] = []  # of the input's axes among the slices
    for i in range(count):
        if masks("ellipsis", i):
            places += [None] * (rank - (count - num_new - 1))
        elif not masks("new_axis", i):
            places.append(i)
    place = places[axis] if axis < len(places) else None
    if place is None:
        return None, None, 1, False
    begin, end = (
        None if masks(name, place) else bound(i, place) for i, name in [(1, "begin"), (2, "end")]
    )
    return begin, end, bound(3, place), masks("shrink_axis", place)


def take_slice(op: Op) -> Fact:
    """Returns the fact of StridedSlice or Slice."""
    fact = op.facts[0]
    if fact.parts:
        *bounds, is_index = slice_along(op, 0)
        if op.inputs[1].shape != (1,) or any(isinstance(bound, Fact) for bound in bounds):
            return Fact(local=fact.local, degree=None)
        return fact.parts[bounds[0]] if is_index else sizes(fact.parts[slice(*bounds)])
    if fact.axis is None or fact.axis == UNKNOWN:
        return op.combine(op.facts) if any(f.loop for f in op.facts[1:]) else fact
    begin, end, step, is_index = slice_along(op, fact.axis)
    is_plain, is_start = step == 1 and not is_index, begin in (None, 0)
    ends = end is None or isinstance(end, Fact) and end.degree == 1
    axis = axis_like(op.inputs[0], op.output, fact.axis)
    has_first = slice_along(op, (op.inputs[0].shape.rank or 1) - 1)[0] in (None, 0)
    fact = replace(fact, numbers="own" if fact.numbers == "own" and has_first else "")
    if is_plain and is_start and ends or axis is not None and fact.each is None:
        return replace(fact, axis=axis)
    # A batch that holds two views, one after the other: rows[:n], rows[n:].
    is_half = is_start or isinstance(begin, Fact) and begin.degree == 1
    if axis is not None and fact.each != 1 and is_plain and is_half and ends:
        return replace(fact, axis=axis, each=0)
    if is_index and isinstance(begin, Fact) and begin.is_counter:
        return one_row(fact, begin)
    return op.faulty(replace(fact, axis=axis), PLACE)


def one_row(rows: Fact, counter: Fact) -> Fact:
    """Returns the fact of the row that a loop takes in its current round."""
    return replace(rows, axis=None, loop=counter.loop)


def gather(op: Op) -> Fact:
    """Returns the fact of GatherV2."""
    values, indices = op.facts[:2]
    axis = open_axis(op.output, values.axis if values.has_rows else indices.axis)
    if fault := first_fault(op.facts[:2]):
        return Fact(axis=open_axis(op.output), local=True, fault=fault)
    if values.parts:
        index = tf.get_static_value(op.inputs[1])
        if index is None:
            return Fact(local=values.local, degree=None)
        parts = [values.parts[i] for i in index.reshape(-1)]
        return parts[0] if index.ndim == 0 else sizes(parts)
    if not values.has_rows:
        if indices.has_rows and not values.local:
            return replace(indices, axis=axis, local=True, numbers="")
        return values if indices == SHARED else row_by_row(op)
    of_axis, rank = tf.get_static_value(op.inputs[2]), op.inputs[0].shape.rank or 1
    is_along = of_axis is not None and int(of_axis) % rank == values.axis
    rows = replace(values, axis=axis)
    if op.operation.get_attr("batch_dims"):
        return rows
    if not is_along:
        return op.faulty(rows, COMPARES) if indices.has_rows else rows
    if indices.is_counter:
        return one_row(values, indices)
    if is_of_tensorflow(op.operation, "ragged/"):
        return replace(rows, each=None)
    return _in_order(op, rows, indices)


def _in_order(op: Op, rows: Fact, indices: Fact) -> Fact:
    """Returns the fact of rows in their order, or of rows that a mask chooses; or a fault."""
    if indices.has_rows and indices.numbers == "own":
        return replace(rows, each=None) if indices.each is None else rows
    return op.faulty(rows, f"(tf.gather) {MIXES}")


def gather_ragged(op: Op) -> Fact:
    """Returns the fact of RaggedGather."""
    rows = row_by_row(op)
    is_joined = is_of_tensorflow(op.operation, "ragged/ragged_concat_ops.py")
    return rows if is_joined or not rows.has_rows else _in_order(op, rows, op.facts[-1])


def gather_nd(op: Op) -> Fact:
    """Returns the fact of GatherNd."""
    values, indices = op.facts
    if values.axis in (None, UNKNOWN) or values.axis >= (op.inputs[1].shape[-1] or 1):
        return replace(row_by_row(op), each=indices.each)
    part = indices.parts[values.axis] if indices.parts else indices
    if part.is_counter:
        return one_row(values, part)
    rows = replace(op.combine(op.facts), axis=open_axis(op.output), degree=values.degree)
    is_own = indices.has_rows and indices.numbers == "own" and values.axis == 0
    if is_own or "BatchGatherND" in op.operation.name:
        return replace(rows, each=indices.each)
    return op.faulty(rows, f"(tf.gather_nd) {MIXES}")


def overwrite(op: Op) -> Fact:
    """Returns the fact of TensorScatterUpdate, Sub, Max or Min: new values at some indices."""
    fact, indices = op.facts[:2]
    names_rows = fact.axis is not None and fact.axis < num_scattered_axes(op)
    is_own = not names_rows or indices.has_rows and indices.numbers == "own"
    return row_by_row(op) if is_own else op.faulty(fact, PLACE)


def num_scattered_axes(op: Op) -> int:
    """Returns the number of leading axes that the indices of a TensorScatter operation address."""
    return op.inputs[1].shape[-1] or op.inputs[0].shape.rank or 0


def reserve(op: Op) -> Fact:
    """Returns the fact of TensorListReserve or EmptyTensorList: a list without values."""
    has_rows = op.type == "TensorListReserve" and op.facts[1].degree == 1
    return Fact(axis=0 if has_rows else None, zero=True)


def get_item(op: Op) -> Fact:
    """Returns the fact of TensorListGetItem."""
    values, index = op.facts[:2]
    if values.axis == 0:
        return one_row(values, index) if index.is_counter else op.faulty(values, PLACE)
    if values.axis is None:
        return op.combine([values, index]) if index.loop else values
    return replace(values, axis=open_axis(op.output) if values.axis == UNKNOWN else values.axis - 1)


def set_item(op: Op) -> Fact:
    """Returns the fact of TensorListSetItem (list, index, item) or TensorListPushBack."""
    before, item = op.facts[0], op.facts[-1]
    index = op.facts[1] if len(op.facts) == 3 else Fact(loop=item.loop, numbers="own")
    if index.is_counter:
        if item.loop is index.loop and not item.has_rows:  # each row's value in its place
            return replace(item, axis=0, loop=None, fault=before.fault or item.fault)
        rows = replace(item, axis=0)
        return op.faulty(rows, EACH_ROW) if item.local else rows
    if item.axis is not None and item.axis != UNKNOWN:
        item = replace(item, axis=item.axis + 1)
    if before.axis == 0 and before.local:
        return op.faulty(before, PLACE)
    return item if before.zero else op.choose([before, item])
