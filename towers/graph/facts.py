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
# What an operation does, and the way out.
UNEVEN = (
    "makes of the number of a shard's rows what is neither a mean nor a sum",
    "Divide a sum by tf.shape(x)[0], or compute it of towers.gather(rows).",
)
MIXES = "brings rows of the batch together, or into another order"
CHOSEN = "takes the mean over rows that their own values choose"
EACH_ROW = "gives each row a value that is made of all rows of the batch"
OPAQUE = "makes one value of the rows of the batch, in a way that towers cannot see into"
COMPARES = "compares rows of the batch with each other"


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

    @property
    def name(self) -> str:
        """The kind of a value, or of the sum over the rows: "mean", "sum" or "other"."""
        if self.fault or self.degree is None:
            return "other"
        return {0: "mean", 1: "sum"}.get(self.degree + self.has_rows, "other")


SHARED = Fact()  # by all towers
ROWS = Fact(axis=0, local=True)
COUNT = Fact(degree=1)  # n


def sizes(parts: Sequence[Fact]) -> Fact:
    """The fact of a vector, by those of its elements."""
    degrees = {part.degree for part in parts} or {0}
    degree = degrees.pop() if len(degrees) == 1 else None
    return Fact(local=any(part.local for part in parts), degree=degree, parts=tuple(parts))


def first_fault(facts: Sequence[Fact]) -> Fault | None:
    """The fault that came first."""
    return next((fact.fault for fact in facts if fact.fault), None)


class Op:
    """An operation of a graph, and what its arithmetic makes of facts.

    facts: of its inputs. output: its first.
    """

    def __init__(self, operation: tf.Operation, facts: Sequence[Fact]) -> None:
        """Args: operation, facts: see the class."""
        self.operation, self.facts = operation, list(facts)
        self.type: str = operation.type
        self.inputs: list[tf.Tensor] = list(operation.inputs)
        self.output: tf.Tensor = operation.outputs[0]

    def faulty(self, fact: Fact, what: str, *remedy: str) -> Fact:
        """A fact with a fault that this operation begins, unless it had one before."""
        fault = fact.fault or Fault(self.operation, what, *remedy)
        return replace(fact, fault=fault, local=True, parts=(), zero=False)

    def joined(self, facts: Sequence[Fact]) -> Fact:
        """The fact of operands that meet row by row; axis and degree are for the caller to say."""
        rows = [fact for fact in facts if fact.has_rows]
        each = {fact.each for fact in rows} or {1}
        known = max((e for e in each if e is not None), default=None)
        result = Fact(
            axis=rows[0].axis if rows else None, local=any(fact.local for fact in facts),
            each=1 if 1 in each else known, fault=first_fault(facts),
        )
        has_both = rows and any(fact.is_value for fact in facts)
        return self.faulty(result, EACH_ROW) if has_both else result

    def added(self, facts: Sequence[Fact]) -> Fact:
        """The fact of a sum, of a stack, or of a choice between values."""
        counted = [fact for fact in facts if not fact.zero]
        if not counted:
            return facts[0]
        result = self.joined([*counted, *(fact for fact in facts if fact.has_rows)])
        degrees = {fact.degree for fact in counted}
        if result.fault or len(degrees) == 1:
            return result if result.fault else replace(result, degree=degrees.pop())
        if not result.local:
            return replace(result, degree=None)
        if result.has_rows:
            is_index = not self.output.dtype.is_floating
            return result if is_index else self.faulty(result, *UNEVEN)
        if not all(fact.local for fact in counted):  # such as the 1 that smooths a Dice loss
            return self.faulty(result, "adds a constant to a sum over the rows of the batch")
        return self.faulty(result, "adds a sum over the rows of the batch to a mean", SAME_KIND)

    def multiplied(self, left: Fact, right: Fact, power: int = 1) -> Fact:
        """The fact of left * right, or of left / right, where the power is -1."""
        result = self.joined([left, right])
        if result.fault:
            return result
        if power < 0 and right.is_value:
            return self.faulty(
                result, "divides by a value that is made of the rows of the batch",
                f"{GATHER} {MASKED}",
            )
        if left.is_value and right.is_value:
            return self.faulty(result, "multiplies two values that are made of the batch")
        if left.degree is not None and right.degree is not None:
            return replace(result, degree=left.degree + power * right.degree)
        result = replace(result, degree=None)
        return self.faulty(result, *UNEVEN) if result.local else result

    def nonlinear(self, fact: Fact) -> Fact:
        """The fact of a function of one value that is not linear."""
        if fact.fault:
            return fact
        if fact.is_value:
            return self.faulty(
                fact, f"takes {self.type} of a value that is made of all rows of the batch"
            )
        if fact.has_rows and fact.degree:
            fact = replace(fact, degree=None)
            return self.faulty(fact, *UNEVEN) if fact.local else fact
        degree = 0 if fact.degree == 0 else None
        return Fact(axis=fact.axis, local=fact.local, each=fact.each, degree=degree)
