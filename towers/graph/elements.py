"""Holds the rules of operations that combine elements one by one, move, join or count them."""

import functools
import math
from dataclasses import replace

import tensorflow as tf

from towers.graph.facts import (
    COMPARES, COUNT, EACH_ROW, OPAQUE, PLACE, SHARED, UNEVEN, UNKNOWN, Fact, Op, axis_like,
    first_fault, open_axes, open_axis, sizes,
)
from towers.machine.user_lines import is_of_tensorflow


def row_by_row(op: Op, output: tf.Tensor | None = None) -> Fact:
    """Returns the fact of an operation without a rule: rows become rows."""
    output = op.output if output is None else output
    rows = [fact for fact in op.facts if fact.has_rows]
    # Beside rows, integer inputs are usually counts, such as the longest sequence; ignore them.
    used = [
        fact for fact, tensor in zip(op.facts, op.inputs)
        if fact.has_rows or fact.loop or tensor.dtype.is_floating or not rows
    ]
    # A ragged tensor's row_splits are rows' numbers.
    is_even = all(fact.degree == 0 for fact in used) or is_of_tensorflow(op.operation, "ragged/")
    fact = replace(op.combine(used), degree=0 if is_even else None)
    if rows:
        axis = UNKNOWN if output.dtype == tf.variant else open_axis(output, rows[0].axis)
        fact = replace(fact, axis=axis)
        if axis is None and fact.local:
            return op.faulty(fact, OPAQUE)
    return op.nonlinear(fact)


def align(op: Op, result: Fact) -> Fact:
    """Sets the batch axis of a result of operands of any rank, which align at the last axis.

    The result has a fault if rows are paired with other rows, as in [n, 1] + [1, n].
    """
    places = {
        fact.axis - tensor.shape.rank for fact, tensor in zip(op.facts, op.inputs)
        if fact.axis is not None and fact.axis != UNKNOWN and tensor.shape.rank is not None
    }
    if len(places) > 1 and not first_fault(op.facts):
        return op.faulty(op.combine(op.facts), COMPARES)
    rank = op.output.shape.rank
    if len(places) != 1 or not result.has_rows or result.axis == UNKNOWN or rank is None:
        return result
    return replace(result, axis=rank + places.pop())


def add(op: Op) -> Fact:
    """Returns the fact of Add, Sub, AddN or SquaredDifference."""
    first = op.facts[0]
    if first.numbers == "splits" and op.type == "Sub" and not first.has_rows:
        return COUNT if is_number(op.inputs[1], 1) else first
    total = align(op, op.add(op.facts))
    return op.multiply(total, total) if op.type == "SquaredDifference" else total


def divide(op: Op) -> Fact:
    """Returns the fact of RealDiv or DivNoNan."""
    left, right = op.facts
    if not right.local and is_number(op.inputs[0], 0):  # a regularizer with the factor 0, by n
        return left
    return align(op, op.multiply(left, right, power=-1))


def is_number(tensor: tf.Tensor, number: int) -> bool:
    """Returns whether all elements of a tensor are a constant number."""
    value = tf.get_static_value(tensor)
    return value is not None and bool((value == number).all())


# Comparisons of n with a bound that are always true, because a shard has at least one row.
_ALWAYS = {"Greater": (0,), "GreaterEqual": (0, 1), "NotEqual": (0,)}


def pair(op: Op) -> Fact:
    """Returns the fact of a nonlinear function of two numbers: a power, a comparison, a bound."""
    bounds = [tf.get_static_value(v) if v.shape.rank == 0 else None for v in op.inputs]
    for count, other, bound in zip(op.facts, op.facts[::-1], bounds[::-1]):
        # max(n, 1) is n, because a shard has at least one row.
        is_kept = op.type == "Maximum" and other.degree == 0 and bound is not None and bound <= 1
        if count == COUNT and is_kept:
            return COUNT
    if op.facts[0] == COUNT and bounds[1] in _ALWAYS.get(op.type, ()):
        return SHARED
    fact = align(op, op.combine(op.facts))
    return fact if fact.fault else row_by_row(op)


def select(op: Op) -> Fact:
    """Returns the fact of Select, which chooses between two values by a condition."""
    condition, *branches = op.facts
    test = op.inputs[0].op
    # tf.vectorized_map takes number 0 if n is 1; Keras counts numbers below 0 from the end.
    if branches[0].numbers == "own" and test.type == "Greater" and not condition.has_rows:
        return branches[0]
    if branches[1].numbers == "own" and test.type == "Less" and is_number(test.inputs[1], 0):
        return branches[1]
    result = op.add(branches)
    if condition.fault:
        return replace(result, fault=op.combine(op.facts).fault, local=True)
    if condition.has_rows:
        degree = next((b.degree for b in branches if not b.zero), 0)
        return align(op, op.add([*branches, replace(condition, degree=degree)]))
    is_uneven = condition.is_value or condition.degree != 0 and result.local
    return op.faulty(result, *UNEVEN) if is_uneven else result


def constant(op: Op) -> Fact:
    """Returns the fact of Const."""
    is_number = op.output.shape.rank == 0 and op.output.dtype.is_floating
    return Fact(zero=is_number and abs(float(tf.get_static_value(op.output))) <= 1e-6)


def fill_like(op: Op) -> Fact:
    """Returns the fact of ZerosLike or OnesLike."""
    fact = op.facts[0]
    # If values choose the rows (each is None), the number of ones depends on the values.
    rows = Fact(axis=fact.axis, each=fact.each, local=fact.each is None)
    return replace(rows if fact.has_rows else SHARED, zero=op.type == "ZerosLike")


def identity(op: Op) -> Fact:
    """Returns the fact of Identity or a similar operation, which may make an unknown rank known."""
    fact = op.facts[0]
    if fact.axis != UNKNOWN or op.output.shape.rank is None or op.output.dtype == tf.variant:
        return fact
    fact = replace(fact, axis=open_axis(op.output))
    return fact if fact.has_rows else op.faulty(fact, OPAQUE)


def move(op: Op) -> Fact:
    """Returns the fact of Reshape, Squeeze, ExpandDims, Transpose or Pad, which move elements."""
    fact, source, result = op.facts[0], op.inputs[0], op.output
    are_columns = source.shape.rank != 1 and source.shape[-1:] not in ([1], [None])
    fact = replace(fact, parts=(), numbers="" if are_columns else fact.numbers)
    if not fact.has_rows:
        return fact
    counts = [i for i, part in enumerate(op.facts[-1].parts) if part.degree == 1]
    by_count = op.type == "Reshape" and len(counts) == 1
    axis = counts[0] if by_count else axis_like(source, result, fact.axis)
    if op.type == "Transpose":
        order = tf.get_static_value(op.inputs[1])
        is_known = fact.axis != UNKNOWN and order is not None
        axis = order.tolist().index(fact.axis) if is_known else open_axis(result)
    if axis is None:  # such as tf.reshape(x, [1, 3]), for a batch of one row
        return op.faulty(replace(fact, axis=None), OPAQUE)
    fact = replace(fact, axis=axis)
    if op.type == "Reshape" and fact.each is not None:
        has_count = by_count and op.facts[-1].parts[axis] == COUNT
        each = 1 if has_count else rows_per_example(fact.each, source, result)
        if each is None or _splits_rows(op.facts[0], source, fact, result):
            return op.faulty(fact, "puts rows of several examples into one")
        fact = replace(fact, each=each)
    if "Pad" in op.type and axis != UNKNOWN:
        paddings = tf.get_static_value(op.inputs[1], partial=True)
        if paddings is None or any(paddings[axis]):
            return op.faulty(fact, "adds rows to the rows of the batch")
    return fact


def _splits_rows(before: Fact, source: tf.Tensor, after: Fact, result: tf.Tensor) -> bool:
    """Whether a Reshape puts values of several examples into a row, as [3, n] -> [n, 3] does."""
    if UNKNOWN in (before.axis, after.axis):
        return False
    (lead, row), (new_lead, new_row) = (
        [math.prod(size or 0 for size in part) for part in (v.shape[:i], v.shape[i + 1:])]
        for v, i in ((source, before.axis or 0), (result, after.axis or 0))
    )
    if lead == new_lead or not (lead and new_lead and row and new_row):
        return False
    return bool(row % new_row) if new_lead == 1 else new_lead != before.each


def rows_per_example(each: int, source: tf.Tensor, result: tf.Tensor) -> int | None:
    """Returns the number of rows per example, `each` before, after a Reshape into [rows, ...].

    0 means a fixed, unknown number. None means that a row may hold values of several examples.
    """
    if source.shape.rank is None or result.shape.rank is None:
        return 0
    before, after = (
        math.prod(size for size in v.shape.as_list() if size is not None) for v in (source, result)
    )
    are_known = len(open_axes(source)) == 1 and len(open_axes(result)) == 1
    if are_known and each and before and after:
        count, rest = divmod(each * before, after)
        return None if rest else count
    if not after or before % after == 0 or len(open_axes(result)) > 1:
        return each if source.shape.rank == result.shape.rank else 0
    return None


def broadcast(op: Op) -> Fact:
    """Returns the fact of BroadcastTo, Tile or Fill, whose new shape may have a batch axis."""
    shape, fact = op.facts if op.type == "Fill" else op.facts[::-1]
    if fact.has_rows:
        return replace(fact, axis=axis_like(op.inputs[0], op.output, fact.axis))
    fact, axis = replace(fact, parts=()), open_axis(op.output)
    if shape.degree == 0 or axis is None:
        return fact
    rows = replace(fact, axis=axis)
    if any(part.local for part in shape.parts):  # one for each chosen row
        return replace(rows, local=True, each=None)
    return op.faulty(rows, EACH_ROW) if fact.is_value else rows


def count_up(op: Op) -> Fact:
    """Returns the fact of Range: the rows' numbers, if it counts from 0 to n."""
    start, _, delta = map(tf.get_static_value, op.inputs)
    if op.facts[1].degree == 0:
        return SHARED
    counts = op.facts[1] == COUNT and start == 0 and delta == 1
    return Fact(axis=0, degree=None, numbers="own" if counts else "")


def choose(op: Op) -> Fact:
    """Returns the fact of Where, which lists the places that a condition chooses."""
    fact = op.facts[0]
    if not fact.has_rows:
        return fact
    return replace(fact, axis=0, each=None, numbers="own" if fact.axis == 0 else "")


def shape(op: Op) -> Fact:
    """Returns the fact of Shape or Size, which count rows."""
    tensor, fact = op.inputs[0], op.facts[0]
    if not tensor.shape.rank:
        return SHARED
    axis = open_axis(tensor) if fact.axis == UNKNOWN else fact.axis
    number = COUNT if fact.each is not None else Fact(local=True, degree=1)
    parts = [number if i == axis else SHARED for i in range(tensor.shape.rank)]
    if fact.numbers == "splits":
        parts = [Fact(degree=None, numbers="splits")]
    return sizes(parts) if op.type == "Shape" else functools.reduce(op.multiply, parts)


def concat(op: Op) -> Fact:
    """Returns the fact of ConcatV2."""
    values, result = op.facts[:-1], op.output
    rank, axis = result.shape.rank, tf.get_static_value(op.inputs[-1])
    places = {fact.axis for fact in values if fact.has_rows}
    if not places and result.dtype.is_integer and rank == 1:
        return sizes([
            part for fact, tensor in zip(values, op.inputs)
            for part in fact.parts or [fact] * (tensor.shape[0] or 0)
        ])
    whole = op.add(values)
    whole = replace(whole, numbers=values[0].numbers)
    if whole.fault or axis is None or rank is None or int(axis) % rank not in places:
        return whole
    each = [fact.each for fact in values]
    if not all(fact.has_rows for fact in values):
        are_splits = whole.each is None and result.dtype.is_integer  # row_splits from lengths
        return whole if are_splits else op.faulty(whole, "joins the rows of the batch with others")
    total = 0 if 0 in each else sum(filter(None, each))
    return replace(whole, each=None if None in each else total)


def stack(op: Op) -> Fact:
    """Returns the fact of Pack (tf.stack)."""
    has_rows = any(fact.has_rows for fact in op.facts)
    if not has_rows and op.output.dtype.is_integer and op.output.shape.rank == 1:
        return sizes(op.facts)
    fact = replace(op.add(op.facts), parts=())
    if fact.axis is None or fact.axis == UNKNOWN:
        return fact
    place = op.operation.get_attr("axis") % op.output.shape.rank
    return replace(fact, axis=fact.axis + (place <= fact.axis), numbers=op.facts[0].numbers)


def unstack(op: Op) -> Fact | list[Fact]:
    """Returns the fact of Unpack (tf.unstack), or one fact for each output."""
    fact = op.facts[0]
    if fact.parts or fact.axis is None or fact.axis == UNKNOWN:
        return list(fact.parts) or fact
    place = op.operation.get_attr("axis") % (op.inputs[0].shape.rank or 1)
    return replace(fact, axis=fact.axis - (place < fact.axis), numbers="")


def split(op: Op) -> Fact:
    """Returns the fact of Split, with inputs (axis, value), or SplitV: (value, sizes, axis)."""
    is_even = op.type == "Split"
    fact, axis = (op.facts[1], op.inputs[0]) if is_even else (op.facts[0], op.inputs[2])
    place, rank, count = tf.get_static_value(axis), op.output.shape.rank, len(op.operation.outputs)
    if not fact.has_rows or fact.axis == UNKNOWN or place is None:
        return replace(fact, parts=())
    fact = replace(fact, numbers="")
    if rank is not None and int(place) % rank != fact.axis or fact.each is None:
        return fact
    if fact.each == 1 or is_even and fact.each % count:
        return op.faulty(fact, PLACE)
    return replace(fact, each=fact.each // count if is_even else 0)
