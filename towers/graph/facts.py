"""Facts on what a tensor is to the rows of its shard, and what arithmetic makes of them.

    rows      a value for each row, which no other row has a part in
    value     no batch axis, and yet made of the rows' values:
                  degree 0: linear in means over the rows    weighs n_i / N in the batch's
                  degree 1: linear in sums over the rows     towers' values add up to the batch's
    constant  no row's values have a part in it; of degree 1: n, the number of rows; -1: 1 / n
    fault     anything else: the towers' values do not make the batch's
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import tensorflow as tf

UNKNOWN = -1  # the batch axis of a tensor of unknown rank

GATHER = "Compute it of towers.gather(rows), the rows of all towers."
MASKED = (
    "For a mean over a mask or over weights: tf.reduce_sum(towers.gather(values * mask)) / "
    "tf.reduce_sum(towers.gather(mask))."
)
ONE_LENGTH = (
    "Give all rows one length, with TextVectorization(output_sequence_length=N) or "
    "ragged.to_tensor(shape=[None, N]); or mask the padding, as Embedding(mask_zero=True) does."
)
SAME_KIND = f"Take tf.reduce_mean of both, or divide the sum by tf.shape(x)[0]. {GATHER}"


class Fault(NamedTuple):
    """The operation at which a tensor stops being rows, a mean or a sum.

    operation: the first that does it. what: it does. remedy: the way out, a sentence.
    """

    operation: tf.Operation
    what: str
    remedy: str = GATHER


@dataclass(frozen=True)
class Fact:
    """See the module.

    axis: the batch axis; None where there is none.
    local: whether the rows' values have a part in it.
    degree: of its growth where the shard's rows are repeated; None: not by a power.
    each: rows for each example; 0: some fixed number; None: as the rows' values say.
    parts: the elements of a vector of sizes, one by one.
    zero: whether it is the constant 0, or of the size of a rounding.
    more: a ragged tensor's row_splits are one more than its rows; so is the number of them.
    padded: whether its rows are as long as the longest of the shard, and nothing has masked that.
    masks: whether it may tell which of such elements are padding.
    """

    axis: int | None = None
    local: bool = False
    degree: int | None = 0
    each: int | None = 1
    parts: "tuple[Fact, ...]" = ()
    zero: bool = False
    more: int = 0
    padded: bool = False
    masks: bool = False
    fault: Fault | None = None

    @property
    def has_rows(self) -> bool:
        """Whether there is a batch axis."""
        return self.axis is not None

    @property
    def is_value(self) -> bool:
        """Whether it is made of the rows' values, and has no batch axis."""
        return self.local and self.axis is None


SHARED = Fact()  # by all towers
ROWS = Fact(axis=0, local=True)
COUNT = Fact(degree=1)  # n


def sizes(parts: Sequence[Fact]) -> Fact:
    """The fact of a vector, by those of its elements."""
    degrees = {part.degree for part in parts}
    return Fact(
        local=any(part.local for part in parts), degree=degrees.pop() if len(degrees) == 1 else
        None if degrees else 0, parts=tuple(parts),
    )


def first_fault(facts: Sequence[Fact]) -> Fault | None:
    """The fault that came first."""
    return next((fact.fault for fact in facts if fact.fault), None)


def joined(operation: tf.Operation, facts: Sequence[Fact]) -> Fact:
    """The fact of operands that meet row by row; axis and degree are for the caller to say.
    """
    fault = first_fault(facts)
    rows = [fact for fact in facts if fact.has_rows]
    if rows and fault is None and any(fact.is_value for fact in facts):
        fault = Fault(operation, "gives each row a value that is made of all rows of the batch")
    each = {fact.each for fact in rows}
    return Fact(
        axis=rows[0].axis if rows else None, local=any(fact.local for fact in facts), fault=fault,
        each=1 if 1 in each or not each else max((e for e in each if e is not None), default=None),
    )


def added(operation: tf.Operation, facts: Sequence[Fact]) -> Fact:
    """The fact of a sum, of a stack, or of a choice between values."""
    counted = [fact for fact in facts if not fact.zero]
    if not counted:
        return facts[0]
    result = joined(operation, [*counted, *(fact for fact in facts if fact.has_rows)])
    if result.fault:
        return result
    degrees = {fact.degree for fact in counted}
    if len(degrees) == 1:
        return replace(result, degree=degrees.pop())
    if not result.local:
        return replace(result, degree=None)
    if result.has_rows:
        is_index = not operation.outputs[0].dtype.is_floating
        return result if is_index else replace(result, fault=uneven(operation))
    if not all(fact.local for fact in counted):  # such as the 1 that smooths a Dice loss
        return replace(result, fault=Fault(
            operation, "adds a constant to a sum over the rows of the batch"
        ))
    return replace(result, fault=Fault(
        operation, "adds a sum over the rows of the batch to a mean", SAME_KIND
    ))


def multiplied(operation: tf.Operation, left: Fact, right: Fact) -> Fact:
    """The fact of a product."""
    result = joined(operation, [left, right])
    if result.fault:
        return result
    if left.is_value and right.is_value:
        return replace(
            result, fault=Fault(operation, "multiplies two values that are made of the batch")
        )
    return _of_degree(operation, result, left.degree, right.degree, 1)


def divided(operation: tf.Operation, left: Fact, right: Fact) -> Fact:
    """The fact of a quotient."""
    result = joined(operation, [left, right])
    if result.fault:
        return result
    if right.is_value:
        return replace(result, fault=Fault(
            operation, "divides by a value that is made of the rows of the batch",
            f"{GATHER} {MASKED}",
        ))
    return _of_degree(operation, result, left.degree, right.degree, -1)


def _of_degree(
    operation: tf.Operation, result: Fact, left: int | None, right: int | None, sign: int
) -> Fact:
    if left is not None and right is not None:
        return replace(result, degree=left + sign * right)
    return replace(result, degree=None, fault=uneven(operation) if result.local else None)


def uneven(operation: tf.Operation) -> Fault:
    """The number of a shard's rows has another part in a value than to divide a sum by."""
    return Fault(
        operation, "makes of the number of a shard's rows what is neither a mean nor a sum",
        "Divide a sum by tf.shape(x)[0], or compute it of towers.gather(rows).",
    )


def nonlinear(operation: tf.Operation, fact: Fact) -> Fact:
    """The fact of a function of one value that is not linear."""
    if fact.fault:
        return fact
    if fact.is_value:
        return replace(fact, fault=Fault(
            operation, f"takes {operation.type} of a value that is made of all rows of the batch"
        ))
    if fact.has_rows and fact.degree:
        return replace(fact, fault=uneven(operation) if fact.local else None, degree=None)
    return Fact(axis=fact.axis, local=fact.local, each=fact.each,
                degree=0 if fact.degree == 0 else None)
