"""Holds what rules share: the table, the operation as rules see it, and common answers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from towers.divide.facts import (
    EACH, ONCE, OWN, PART, SIZE, WHOLE, Each, Fact, Need, Op, rows, rows_of,
)  # fmt: skip
from towers.divide.probes import Dim, Probes

Dims = Sequence[Dim]
FIRST = rows(0)


class Look:
    """An operation as rules see it. Inputs and outputs are given by their index."""

    def __init__(self, op: Op, probes: Probes, is_inside: bool = False) -> None:
        """is_inside: whether it is in a loop or a condition, where towers cannot meet."""
        self.op, self.type, self.probes, self.is_inside = op, op.type, probes, is_inside
        self.inputs, self.outputs = op.inputs, op.outputs

    def attr(self, name: str) -> Any:
        """Returns an attribute; text is a str."""
        found = self.op.source.get_attr(name)
        if isinstance(found, bytes):
            return found.decode()
        return found

    def fact(self, i: int) -> Fact:
        """Returns what is known of an input. A size counts as a value that is there once."""
        found = self.inputs[i].fact
        if found == SIZE:
            return ONCE
        return found

    def facts(self) -> list[Fact]:
        """Returns `fact` of all inputs."""
        return [self.fact(i) for i in range(len(self.inputs))]

    def is_size(self, i: int) -> bool:
        """Returns whether an input follows from shapes and constants alone."""
        return self.inputs[i].fact == SIZE

    def dims(self, i: int) -> Any:
        """Returns the sizes of an input's axes, or None. Rules in `RULES` see known ones."""
        return self.probes.dims(self.inputs[i])

    def out(self, i: int = 0) -> Any:
        """Returns the sizes of an output's axes, or None. Rules in `RULES` see known ones."""
        return self.probes.dims(self.outputs[i])

    def const(self, i: int) -> Any:
        """Returns the value of an integer input that no batch size changes, or None."""
        return self.probes.const(self.inputs[i])

    def values(self, i: int) -> list[np.ndarray] | None:
        """Returns the values of an integer input at the probes, or None."""
        return self.probes.values(self.inputs[i])

    # Answers of rules.

    def each(self, needs: Sequence[Need], *facts: Fact, **more: Any) -> Each | None:
        """Answers that the operation runs in every tower. One fact serves all outputs.

        A tower's shape must follow from shapes; None: it does not.
        """
        assert len(needs) == len(self.inputs)
        if any(need.kind == "shape" and not self.is_size(i) for i, need in enumerate(needs)):
            return None
        if len(facts) > 1:
            found = list(facts)
        else:
            found = [facts[0]] * len(self.outputs)
        return Each(list(zip(self.inputs, needs, strict=True)), found, **more)

    def own_first(self, fact: Fact | None = None, **more: Any) -> Each | None:
        """Answers that towers use their own first input and whole other inputs."""
        others = [WHOLE] * (len(self.inputs) - 1)
        return self.each([OWN, *others], fact or self.fact(0), **more)

    def linear(self) -> Each | None:
        """Answers that parts of the first input make parts of the result. Integers are rounded."""
        dtype = self.outputs[0].dtype
        if dtype.is_floating or dtype.is_complex:
            return self.own_first(PART)
        return None

    def only_rows_axis(self) -> int | None:
        """Returns the axis of the first output that counts rows, if just one depends on them."""
        return self.probes.rows_axis(self.outputs[0])


Rule = Callable[[Look], Each | None]
RULES: dict[str, Rule] = {}


def rule(*types: str, table: dict[str, Rule] = RULES) -> Callable[[Rule], Rule]:
    """Adds a rule to a table, for these types of operations."""

    def add(function: Rule) -> Rule:
        assert table.keys().isdisjoint(types), "each type of operation has one rule"
        table.update(dict.fromkeys(types, function))
        return function

    return add


def rule_of_rows(*types: str, is_linear: bool = False) -> Callable[[Rule], Rule]:
    """Adds a rule that answers only if the first input has rows.

    is_linear: whether parts of the first input make parts of the result.
    """

    def add(function: Rule) -> Rule:
        @functools.wraps(function)
        def answer(look: Look) -> Each | None:
            if look.fact(0) == PART and is_linear:
                return look.linear()
            if look.fact(0).kind == "rows":
                return function(look)
            return None

        return rule(*types)(answer)

    return add


def align(look: Look, result: int = 0) -> Each | None:
    """Answers for inputs that are broadcast with each other, as in x + y.

    The rows of one input become the rows of the result. Other inputs with as many rows along that
    axis give theirs; inputs without that axis are whole. Parts are added up before.
    """
    out, facts = look.out(result), look.facts()
    first = next((i for i, fact in enumerate(facts) if fact.kind == "rows"), None)
    if first is None:
        return None
    axis = facts[first].axis + len(out) - len(look.dims(first))
    needs = []
    for i, fact in enumerate(facts):
        dims = look.dims(i)
        own = axis - (len(out) - len(dims))
        has_rows = own >= 0 and dims[own] == out[axis]
        needs.append(rows_of(own) if has_rows else OWN if fact == EACH else WHOLE)
    return look.each(needs, rows(axis))


def batches(look: Look, indices: Sequence[int], fact: Fact = FIRST) -> Each | None:
    """Answers for inputs that all have the rows of the batch along axis 0, if one of them has.

    Other inputs are whole.
    """
    facts = look.facts()
    if all(facts[i] != FIRST for i in indices):
        return None
    return look.each([rows_of(0) if i in indices else WHOLE for i in range(len(facts))], fact)


def contract(
    look: Look, terms: Sequence[Sequence[object]], result: Sequence[object]
) -> Each | None:
    """Answers for a product of tensors, given the labels of their axes, as in Einsum.

    A label in the result keeps its rows; a label that is summed over makes parts. A tensor with
    rows along another label is gathered.
    """
    facts = look.facts()
    if facts.count(PART) == 1 and facts.count(ONCE) == len(facts) - 1:
        return look.each([OWN if f == PART else WHOLE for f in facts], PART)
    # The rows of one tensor decide; the others give theirs along the axis of the same label.
    first = next((i for i, f in enumerate(facts) if f.kind == "rows"), None)
    if first is None:
        return None
    label = terms[first][facts[first].axis]
    if any(term.count(label) > 1 for term in terms):
        return None  # a diagonal
    needs = [rows_of(term.index(label)) if label in term else WHOLE for term in terms]
    return look.each(needs, rows(result.index(label)) if label in result else PART)


def kept_axes(dims: Dims, axes: np.ndarray | Sequence[int]) -> set[int]:
    """Returns axes, which may be negative or a single one, as non-negative integers."""
    return {int(axis) % len(dims) for axis in np.atleast_1d(axes)}
