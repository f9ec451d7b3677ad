"""Sizes, parts of tensors, and tensors of parts: facts of inputs -> of the output, or outputs."""

from dataclasses import replace

import tensorflow as tf

from towers.graph.axes import axis_like, begins_and_ends_at_counts, open_axis, taken, takes_all
from towers.graph.facts import COUNT, SHARED, UNKNOWN, Fact, added, first_fault, joined, sizes
from towers.graph.reductions import MIXES, product_of, scattered_axes
from towers.graph.row_by_row import Inputs, faulty, row_by_row

_PLACE = "takes some rows of the batch by their place"


# Sizes.


def shape(operation: tf.Operation, facts: Inputs) -> Fact:
    """Shape, Size: counts."""
    parts = _sizes_of(operation.inputs[0], facts[0])
    if operation.type == "Shape":
        return sizes(parts) if parts else SHARED
    return product_of(operation, parts)  # Size


def _sizes_of(tensor: tf.Tensor, fact: Fact) -> list[Fact]:
    if tensor.shape.rank is None:
        return []
    axis = open_axis(tensor) if fact.axis == UNKNOWN else fact.axis
    source = tensor.op
    while source.type in ("Cast", "Identity"):
        source = source.inputs[0].op
    if fact.more and source.type == "Placeholder":
        return [Fact(degree=None, more=fact.more)]
    number = COUNT if fact.each is not None else Fact(local=True, degree=1)
    return [number if i == axis else SHARED for i in range(tensor.shape.rank)]


def no_values(operation: tf.Operation, facts: Inputs) -> Fact:
    """Rank, LinSpace: no row's values, whatever says how many there are."""
    return SHARED


def numbered(operation: tf.Operation, facts: Inputs) -> Fact:
    """Range: the rows' numbers, or no row's values, whatever says how many there are."""
    return Fact(axis=0, degree=None) if facts[1] == COUNT else SHARED


# Parts of tensors, and tensors of parts.


def sliced(operation: tf.Operation, facts: Inputs) -> Fact:
    """StridedSlice, Slice."""
    fact, result = facts[0], operation.outputs[0]
    if fact.parts:
        place = taken(operation)
        if place is None:
            return Fact(local=fact.local, degree=None)
        shrinks, begin, end, step = place
        return fact.parts[begin] if shrinks else sizes(fact.parts[begin:end:step])
    if fact.axis is None or fact.axis == UNKNOWN:
        return fact
    whole = takes_all(operation, fact.axis, facts)
    axis = axis_like(operation.inputs[0], result, fact.axis)
    by_counts = fact.each != 1 and axis is not None and begins_and_ends_at_counts(
        operation, fact.axis, facts
    )
    if whole or by_counts or fact.each is None and axis is not None:
        return replace(fact, axis=axis, each=fact.each if whole or fact.each is None else 0)
    return faulty(operation, replace(fact, axis=axis), _PLACE)


def overwritten(operation: tf.Operation, facts: Inputs) -> Fact:
    """TensorScatterUpdate, Sub, Max, Min: new values at some indices."""
    fact, indices = facts[:2]
    names_rows = fact.axis is not None and fact.axis < scattered_axes(operation)
    if names_rows and not indices.has_rows:
        return faulty(operation, fact, _PLACE)
    return row_by_row(operation, facts, operation.outputs[0])


def gathered(operation: tf.Operation, facts: Inputs) -> Fact:
    """GatherV2."""
    values, indices = facts[0], facts[1]
    fault = first_fault(facts[:2])
    if fault:
        return Fact(axis=open_axis(operation.outputs[0]), local=True, fault=fault)
    if values.parts:
        index = tf.get_static_value(operation.inputs[1])
        if index is None:
            return Fact(local=values.local, degree=None)
        parts = [values.parts[i] for i in index.reshape(-1)]
        return parts[0] if index.ndim == 0 else sizes(parts)
    axis = tf.get_static_value(operation.inputs[2])
    batch_dims = operation.get_attr("batch_dims")
    result = operation.outputs[0]
    if not values.has_rows:
        if values.is_value and indices.has_rows:
            return joined(operation, facts[:2])
        if not indices.has_rows:
            return values if indices == SHARED else row_by_row(operation, facts[:2], result)
        return replace(indices, axis=open_axis(result, indices.axis), local=True)
    if batch_dims or axis is None or values.axis == UNKNOWN or int(axis) % max(
            operation.inputs[0].shape.rank or 1, 1) != values.axis:
        return replace(values, axis=open_axis(result, values.axis))
    if indices.has_rows and not indices.local:  # all, in their order
        return replace(values, axis=open_axis(result, values.axis))
    if indices.each is None:  # boolean_mask
        return replace(values, each=None)
    return faulty(operation, replace(values, axis=open_axis(result)), f"(tf.gather) {MIXES}")


def where(operation: tf.Operation, facts: Inputs) -> Fact:
    """Where: the places of the rows that are chosen."""
    return replace(facts[0], axis=0, each=None) if facts[0].has_rows else facts[0]


def partitioned(operation: tf.Operation, facts: Inputs) -> Fact:
    """DynamicPartition."""
    return replace(joined(operation, facts), each=None)


def concatenated(operation: tf.Operation, facts: Inputs) -> Fact:
    """ConcatV2."""
    *values, _ = facts
    result = operation.outputs[0]
    axis = tf.get_static_value(operation.inputs[-1])
    if not any(fact.has_rows for fact in values):
        if result.dtype.is_integer and result.shape.rank == 1:
            parts = [part for fact, tensor in zip(values, operation.inputs) for part in (
                fact.parts or [fact] * (tensor.shape[0] or 0))]
            return sizes(parts)
        return added(operation, values)
    whole = added(operation, values)
    places = {fact.axis for fact in values if fact.has_rows}
    rank = result.shape.rank
    if whole.fault or axis is None or rank is None or places == {UNKNOWN}:
        return whole
    if int(axis) % rank not in places:
        return whole
    if not all(fact.has_rows for fact in values):
        if whole.each is None and result.dtype.is_integer:  # row_splits of lengths
            return whole
        return faulty(operation, whole, "joins the rows of the batch with others")
    each = [fact.each for fact in values]
    if None in each:
        return replace(whole, each=None)
    return replace(whole, each=0 if 0 in each else sum(each))  # type: ignore[arg-type]


def stacked(operation: tf.Operation, facts: Inputs) -> Fact:
    """Pack."""
    result = operation.outputs[0]
    if not any(fact.has_rows for fact in facts):
        if result.dtype.is_integer and result.shape.rank == 1:
            return sizes(facts)
        return replace(added(operation, facts), parts=())
    fact = added(operation, facts)
    if fact.axis == UNKNOWN:
        return fact
    assert fact.axis is not None and result.shape.rank is not None
    place = operation.get_attr("axis") % result.shape.rank
    return replace(fact, axis=fact.axis + (place <= fact.axis))


def unstacked(operation: tf.Operation, facts: Inputs) -> list[Fact]:
    """Unpack."""
    fact, count = facts[0], len(operation.outputs)
    if fact.parts:
        return list(fact.parts)
    if not fact.has_rows or fact.axis == UNKNOWN:
        return [fact] * count
    place = operation.get_attr("axis") % (operation.inputs[0].shape.rank or 1)
    return [replace(fact, axis=fact.axis - (place < fact.axis))] * count


def split(operation: tf.Operation, facts: Inputs) -> list[Fact]:
    """Split of (axis, value), SplitV of (value, sizes, axis)."""
    is_even = operation.type == "Split"
    fact, axis = (facts[1], operation.inputs[0]) if is_even else (facts[0], operation.inputs[2])
    count = len(operation.outputs)
    place = tf.get_static_value(axis)
    if not fact.has_rows or fact.axis == UNKNOWN or place is None:
        return [replace(fact, parts=())] * count
    rank = operation.outputs[0].shape.rank
    if rank is not None and int(place) % rank != fact.axis or fact.each is None:
        return [fact] * count
    if fact.each == 1 or is_even and fact.each and fact.each % count:
        return [faulty(operation, fact, _PLACE)] * count
    return [replace(fact, each=fact.each // count if is_even else 0)] * count
