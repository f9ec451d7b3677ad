"""Operations that work row by row, and element by element: facts of inputs -> of the output."""

from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from towers.graph.axes import axis_like, open_axis, regrouped, transposed
from towers.graph.facts import (
    COUNT,
    SHARED,
    UNKNOWN,
    Fact,
    Fault,
    added,
    divided,
    first_fault,
    joined,
    multiplied,
    nonlinear,
    uneven,
)

Inputs = Sequence[Fact]

OPAQUE = "makes one value of the rows of the batch, in a way that towers cannot see into"


def faulty(operation: tf.Operation, fact: Fact, what: str, *remedy: str) -> Fact:
    """A fact with a fault that this operation begins, unless it had one before."""
    fault = fact.fault or Fault(operation, what, *remedy)
    return replace(fact, fault=fault, local=True, parts=(), zero=False)


def row_by_row(operation: tf.Operation, facts: Inputs, output: tf.Tensor) -> Fact:
    """The rule of operations without one of their own: rows become rows."""
    # Integers of the batch say how many there are of something, such as the longest row's steps.
    floating = [f for f, v in zip(facts, operation.inputs) if f.has_rows or v.dtype.is_floating]
    fault = first_fault(floating)
    rows = [fact for fact in facts if fact.has_rows]
    if rows:
        axis = UNKNOWN if output.dtype == tf.variant else open_axis(output, rows[0].axis)
        fact = replace(joined(operation, floating), axis=axis)
        if fault:
            return replace(fact, fault=fault)
        if axis is None and fact.local:
            return faulty(operation, fact, OPAQUE)
        return nonlinear(operation, replace(fact, degree=rows[0].degree))
    if fault:
        return Fact(local=True, fault=fault)
    values = [fact for fact in facts if fact.local]
    if values:
        return nonlinear(operation, values[0])
    return Fact(degree=0 if all(fact.degree == 0 for fact in facts) else None)


# Element by element.


def same(operation: tf.Operation, facts: Inputs) -> Fact:
    """Identity and its like; what has no known rank may have one from here on."""
    fact, output = facts[0], operation.outputs[0]
    if fact.axis != UNKNOWN or output.shape.rank is None:
        return fact
    fact = replace(fact, axis=open_axis(output))  # known from here on
    return fact if fact.has_rows else faulty(operation, fact, OPAQUE)


def linear(operation: tf.Operation, facts: Inputs) -> Fact:
    """The rule of operations that pick elements of matrices."""
    fact = facts[0]
    return fact if fact.is_value else row_by_row(operation, facts, operation.outputs[0])


def moved(operation: tf.Operation, facts: Inputs) -> Fact:
    """The rule of operations that give the same elements another shape."""
    fact = facts[0]
    if not fact.has_rows:
        return replace(fact, parts=())
    source, result = operation.inputs[0], operation.outputs[0]
    counts = [i for i, part in enumerate(facts[-1].parts) if part.degree == 1]
    if operation.type == "Transpose":
        axis = transposed(operation, fact.axis)
    elif operation.type == "Reshape" and len(counts) == 1:
        axis = counts[0]
    else:
        axis = axis_like(source, result, fact.axis)
    if axis is None:  # such as a reshape to one row, where that is all there is
        return faulty(operation, replace(fact, axis=None), OPAQUE)
    moved_fact = replace(fact, axis=axis)
    if operation.type == "Reshape" and fact.each is not None:
        has_count = len(counts) == 1 and facts[-1].parts[counts[0]] == COUNT
        each = 1 if has_count else regrouped(fact.each, source, result)
        if each is None:
            return faulty(operation, moved_fact, "puts rows of several examples into one")
        moved_fact = replace(moved_fact, each=each)
    if operation.type.startswith(("Pad", "MirrorPad")) and axis != UNKNOWN:
        paddings = tf.get_static_value(operation.inputs[1], partial=True)
        if paddings is None or any(paddings[axis]):
            return faulty(operation, moved_fact, "adds rows to the rows of the batch")
    return moved_fact


def repeated(operation: tf.Operation, facts: Inputs) -> Fact:
    """BroadcastTo, Tile, Fill: into a shape that may have a batch axis."""
    shape, value = (0, 1) if operation.type == "Fill" else (1, 0)
    fact = facts[value]
    if fact.has_rows:
        return replace(fact, axis=axis_like(operation.inputs[value], operation.outputs[0],
                                            fact.axis))
    if facts[shape].degree == 0:
        return replace(fact, parts=())
    axis = open_axis(operation.outputs[0])
    if axis is not None and any(part.local for part in facts[shape].parts):
        fact = replace(fact, local=True, each=None)  # one for each of some chosen rows
        return replace(fact, axis=axis, parts=())
    if axis is None or not fact.local:
        return replace(fact, axis=axis, parts=())
    return faulty(operation, replace(fact, axis=axis), "gives each row a value that is made of "
                  "all rows of the batch")


def cast(operation: tf.Operation, facts: Inputs) -> Fact:
    """Cast; to integers it rounds."""
    before, after = operation.inputs[0].dtype, operation.outputs[0].dtype
    is_rounding = before.is_floating and not after.is_floating
    return nonlinear(operation, facts[0]) if is_rounding else facts[0]


def ragged_rows(operation: tf.Operation, facts: Inputs) -> Fact:
    """RaggedTensorToVariant: one row of a ragged tensor for each example."""
    return replace(row_by_row(operation, facts, operation.outputs[0]), each=1)


def constant(operation: tf.Operation, facts: Inputs) -> Fact:
    """Const."""
    output = operation.outputs[0]
    if output.shape.rank == 0 and output.dtype.is_floating:
        return Fact(zero=abs(float(tf.get_static_value(output))) <= 1e-6)
    return SHARED


def like(operation: tf.Operation, facts: Inputs) -> Fact:
    """ZerosLike, OnesLike."""
    fact = facts[0]
    axis, each = (fact.axis, fact.each) if fact.has_rows else (None, 1)
    # Ones in the place of chosen rows: how many these are is for their values to say.
    return Fact(axis=axis, each=each, local=fact.has_rows and each is None,
                zero=operation.type == "ZerosLike")


def sum_of_all(operation: tf.Operation, facts: Inputs) -> Fact:
    """Add, Sub, AddN."""
    first = facts[0]
    if first.more and not first.has_rows and operation.type == "Sub":
        return COUNT if tf.get_static_value(operation.inputs[1]) == first.more else first
    return crossed(operation, facts) or aligned(operation, facts, added(operation, facts))


def product(operation: tf.Operation, facts: Inputs) -> Fact:
    """Mul."""
    return crossed(operation, facts) or aligned(operation, facts, multiplied(operation, *facts))


def quotient(operation: tf.Operation, facts: Inputs) -> Fact:
    """RealDiv, DivNoNan."""
    return crossed(operation, facts) or aligned(operation, facts, divided(operation, *facts))


def square(operation: tf.Operation, facts: Inputs) -> Fact:
    """Square."""
    return multiplied(operation, facts[0], facts[0])


def squared_difference(operation: tf.Operation, facts: Inputs) -> Fact:
    """SquaredDifference."""
    fact = sum_of_all(operation, facts)
    return fact if fact.fault else multiplied(operation, fact, fact)


def bounded(operation: tf.Operation, facts: Inputs) -> Fact:
    """Maximum, Minimum; a count that is kept from being 0 is a count."""
    left, right = operation.inputs
    for count, other, tensor in ((*facts, right), (*facts[::-1], left)):
        if count == COUNT and operation.type == "Maximum" and other.degree == 0:
            bound = tf.get_static_value(tensor)
            if bound is not None and float(bound) <= 1:
                return COUNT
    return paired(operation, facts)


# A shard has at least one row: comparisons of a count that are always true.
_ALWAYS = {"Greater": (0,), "GreaterEqual": (0, 1), "NotEqual": (0,)}


def paired(operation: tf.Operation, facts: Inputs) -> Fact:
    """A function of two numbers that is not linear: a power, a comparison."""
    if facts[0] == COUNT and tf.get_static_value(operation.inputs[1]) in _ALWAYS.get(
            operation.type, ()):
        return SHARED
    fact = crossed(operation, facts) or joined(operation, facts)
    return fact if fact.fault else row_by_row(operation, facts, operation.outputs[0])


def chosen(operation: tf.Operation, facts: Inputs) -> Fact:
    """Select: a value by a condition."""
    condition, *branches = facts
    if condition.fault:
        return replace(added(operation, branches), fault=condition.fault, local=True)
    if condition.has_rows:
        return crossed(operation, facts) or added(operation, [*branches, replace(
            condition, degree=next((b.degree for b in branches if not b.zero), 0))])
    result = added(operation, branches)
    if condition.degree != 0 and not condition.local and result.local and not result.fault:
        return replace(result, fault=uneven(operation))
    if condition.is_value:
        return faulty(operation, replace(result, local=True), "chooses by a value that is made of "
                      "all rows of the batch")
    return result


def aligned(operation: tf.Operation, facts: Inputs, result: Fact) -> Fact:
    """The result of operands of different ranks, whose axes are counted from the last one."""
    rank = operation.outputs[0].shape.rank
    if not result.has_rows or result.axis == UNKNOWN or rank is None:
        return result
    places = {
        fact.axis - tensor.shape.rank
        for fact, tensor in zip(facts, operation.inputs)
        if fact.axis is not None and fact.axis != UNKNOWN and tensor.shape.rank is not None
    }
    return replace(result, axis=rank + places.pop()) if len(places) == 1 else result


def crossed(operation: tf.Operation, facts: Inputs) -> Fact | None:
    """A fault where rows are paired with other rows: [n, 1] with [1, n]."""
    places = {
        fact.axis - tensor.shape.rank
        for fact, tensor in zip(facts, operation.inputs)
        if fact.has_rows and fact.axis != UNKNOWN and tensor.shape.rank is not None
    }
    if len(places) < 2 or first_fault(facts):
        return None
    return faulty(operation, joined(operation, facts), "compares rows of the batch with each other")
