"""Holds facts on how a tensor depends on the rows of its shard, and the arithmetic of facts.

    rows      a value for each row, which depends on this row alone
    value     has no batch axis, but depends on the rows' values:
                  degree 0: linear in means over the rows    the batch's is sum(n_i / N * value_i)
                  degree 1: linear in sums over the rows     the batch's is sum(value_i)
    constant  depends on no row's values; degree 1: n, the number of rows; degree -1: 1 / n
    one row   in a loop over the rows: depends on the row of the current round alone
    fault     anything else: the towers' values do not determine the batch's value
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
# Effects of an operation, which warnings name; UNEVEN includes the fix.
UNEVEN = (
    "makes of the number of a shard's rows what is neither a mean nor a sum",
    "Divide a sum by tf.shape(x)[0], or compute it of towers.gather(rows).",
)
MIXES = "brings rows of the batch together, or into another order"
PLACE = "takes some rows of the batch by their place"
CHOSEN = "takes the mean over rows that their own values choose"
EACH_ROW = "gives each row a value that is made of all rows of the batch"
OPAQUE = "makes one value of the rows of the batch, in a way that towers cannot see into"
COMPARES = "compares rows of the batch with each other"
DECIDES = "decides by a value that is made of all rows of the batch"
CARRIES = "(tf.while_loop) takes a row's value on to the next rows of the batch"


class Fault(NamedTuple):
    """Names the first operation after which a tensor is neither rows nor a mean nor a sum.

    what: its effect, a verb phrase. remedy: a sentence.
    """

    operation: tf.Operation
    what: str
    remedy: str = GATHER


@dataclass(frozen=True)
class Fact:
    """Holds the fact of a tensor: rows, a value, a constant or a fault.

    axis: the batch axis; None if there is none, UNKNOWN if the rank is unknown.
    local: whether it depends on the rows' values.
    degree: the value scales as k**degree if the rows are repeated k times; None: by no power.
    each: rows per example; 0 is a fixed, unknown number, and None depends on the rows' values.
    parts: the facts of a vector's elements, if these are sizes.
    zero: whether it is 0, or a constant of at most 1e-6, which counts as 0.
    loop: for one row, the body of the loop that takes a row in each round; else None.
    numbers: "own" if each row holds its own number, 0, 1, ..., in its first column; "splits" for a
        ragged tensor's row_splits, and for their number, n + 1.
    padded: whether rows are padded to the longest row of the shard, and no mask was applied.
    masks: whether it may tell which elements are padding.
    """

    axis: int | None = None
    local: bool = False
    degree: int | None = 0
    each: int | None = 1
    parts: "tuple[Fact, ...]" = ()
    zero: bool = False
    loop: Any = None
    numbers: str = ""
    padded: bool = False
    masks: bool = False
    fault: Fault | None = None

    @property
    def has_rows(self) -> bool:
        """Returns whether there is a batch axis."""
        return self.axis is not None

    @property
    def is_value(self) -> bool:
        """Returns whether the tensor depends on all rows' values, and has no batch axis."""
        return self.local and self.axis is None and self.loop is None

    @property
    def is_counter(self) -> bool:
        """Returns whether this is the number of the row that a loop takes in this round."""
        return self.loop is not None and self.numbers == "own"

    @property
    def name(self) -> str:
        """Returns the kind of a value, or of the sum over rows: "mean", "sum" or "other"."""
        if self.fault or self.degree is None:
            return "other"
        return {0: "mean", 1: "sum"}.get(self.degree + self.has_rows, "other")


SHARED = Fact()  # depends on no row
ROWS = Fact(axis=0, local=True)
COUNT = Fact(degree=1)  # n


def sizes(parts: Sequence[Fact]) -> Fact:
    """Returns the fact of a vector from the facts of its elements."""
    degrees = {part.degree for part in parts} or {0}
    degree = degrees.pop() if len(degrees) == 1 else None
    loop = next((part.loop for part in parts if part.loop), None)
    is_local = any(part.local for part in parts)
    return Fact(local=is_local, degree=degree, parts=tuple(parts), loop=loop)


def sum_over_rows(fact: Fact) -> Fact:
    """Returns the fact of the sum over the rows."""
    degree = None if fact.degree is None else fact.degree + 1
    return Fact(local=fact.local, degree=degree, loop=fact.loop)


def first_fault(facts: Sequence[Fact]) -> Fault | None:
    """Returns the first fault, or None."""
    return next((fact.fault for fact in facts if fact.fault), None)


def open_axis(tensor: tf.Tensor, like: int | None = None) -> int | None:
    """Returns an axis of open size: `like` if it is one, else the first; None without any."""
    if tensor.shape.rank is None:
        return UNKNOWN
    places = open_axes(tensor)
    return like if like in places else next(iter(places), None)


def axis_like(source: tf.Tensor, result: tf.Tensor, axis: int | None) -> int | None:
    """Returns the batch axis after a change of shape: it keeps its place among the open axes."""
    if axis is None or axis == UNKNOWN or result.shape.rank is None:
        return open_axis(result)
    before, after = open_axes(source), open_axes(result)
    if not after:
        return None
    return after[before.index(axis) if axis in before and len(before) == len(after) else 0]


def has_open_rows(tensor: tf.Tensor) -> bool:
    """Returns whether rows may be of any length: another axis than the batch's is open."""
    return tensor.dtype == tf.variant or tensor.shape.rank is None or len(open_axes(tensor)) > 1


def open_axes(tensor: tf.Tensor) -> list[int]:
    """Returns the axes of open size of a tensor of known rank."""
    return [i for i, size in enumerate(tensor.shape.as_list()) if size is None]


class Op:
    """Wraps an operation of a graph and the facts of its inputs; computes facts of its result."""

    def __init__(self, operation: tf.Operation, facts: Sequence[Fact]) -> None:
        self.operation, self.facts = operation, list(facts)
        self.type: str = operation.type
        self.inputs: list[tf.Tensor] = list(operation.inputs)
        self.output: tf.Tensor = operation.outputs[0]

    def faulty(self, fact: Fact, what: str, *remedy: str) -> Fact:
        """Returns the fact with a fault at this operation, unless it has a fault already."""
        fault = fact.fault or Fault(self.operation, what, *remedy)
        return replace(fact, fault=fault, local=True, parts=(), zero=False)

    def uneven(self, fact: Fact) -> Fact:
        """Returns the fact without a degree, and with a fault if it depends on the rows' values."""
        fact = replace(fact, degree=None)
        return self.faulty(fact, *UNEVEN) if fact.local else fact

    def combine(self, facts: Sequence[Fact]) -> Fact:
        """Returns the fact of operands combined row by row; the caller sets axis and degree."""
        rows = [fact for fact in facts if fact.has_rows]
        loops = list(dict.fromkeys(fact.loop for fact in facts if fact.loop))
        each = {fact.each for fact in facts if fact.has_rows or fact.loop} or {1}
        known = max((e for e in each if e is not None), default=None)
        result = Fact(
            axis=rows[0].axis if rows else None, local=any(fact.local for fact in facts),
            each=1 if 1 in each else known, loop=loops[0] if loops else None,
            fault=first_fault(facts),
        )
        if loops and (len(loops) > 1 or any(f.local and f.loop is None for f in facts)):
            return self.faulty(result, COMPARES)  # one row, with others or with their mean
        has_both = rows and any(fact.is_value for fact in facts)
        return self.faulty(result, EACH_ROW) if has_both else result

    def add(self, facts: Sequence[Fact]) -> Fact:
        """Returns the fact of a sum, of a stack, or of a choice between values."""
        counted = [fact for fact in facts if not fact.zero]
        if not counted:
            return facts[0]
        result = self.combine([*counted, *(fact for fact in facts if fact.has_rows)])
        degrees = {fact.degree for fact in counted}
        if result.fault:
            return result
        if len(degrees) == 1 or not result.local:
            return replace(result, degree=degrees.pop() if len(degrees) == 1 else None)
        if not result.is_value:  # of integers, such as indices, any sum will do
            return self.faulty(result, *UNEVEN) if self.output.dtype.is_floating else result
        if not all(fact.local for fact in counted):  # such as the 1 that smooths a Dice loss
            return self.faulty(result, "adds a constant to a sum over the rows of the batch")
        return self.faulty(result, "adds a sum over the rows of the batch to a mean", SAME_KIND)

    def choose(self, facts: Sequence[Fact]) -> Fact:
        """Returns the fact of a value that is one of several, such as a branch's result."""
        if all(fact == facts[0] for fact in facts):
            return facts[0]
        result = self.add(facts)
        return replace(result, each=None) if None in [fact.each for fact in facts] else result

    def decide(self, fact: Fact, condition: Fact) -> Fact:
        """Returns the fact of a value that a condition chooses, or ends the computation of."""
        if condition.loop and not condition.fault:
            return replace(self.combine([fact, condition]), degree=fact.degree, parts=fact.parts)
        if condition.local:
            name = "tf.while_loop" if "While" in self.type else "tf.cond"
            return self.faulty(fact, f"({name}) {DECIDES}")
        return fact if condition.degree == 0 else self.uneven(fact)

    def multiply(self, left: Fact, right: Fact, power: int = 1) -> Fact:
        """Returns the fact of left * right, or of left / right if the power is -1."""
        result = self.combine([left, right])
        if result.fault:
            return result
        if power < 0 and right.is_value:
            what = "divides by a value that is made of the rows of the batch"
            return self.faulty(result, what, f"{GATHER} {MASKED}")
        if left.is_value and right.is_value:
            return self.faulty(result, "multiplies two values that are made of the batch")
        if left.degree is None or right.degree is None:
            return self.uneven(result)
        return replace(result, degree=left.degree + power * right.degree)

    def nonlinear(self, fact: Fact) -> Fact:
        """Returns the fact of a nonlinear function of one value."""
        if fact.fault:
            return fact
        if fact.is_value:
            what = f"takes {self.type} of a value that is made of all rows of the batch"
            return self.faulty(fact, what)
        result = Fact(axis=fact.axis, local=fact.local, each=fact.each, loop=fact.loop)
        return result if fact.degree == 0 else self.uneven(result)
