"""Holds what rules share: the table, the operation as rules see it, and common answers."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from towers.divide.facts import (
    EACH,
    ONCE,
    OWN,
    PART,
    SIZE,
    WHOLE,
    Each,
    Fact,
    Need,
    Op,
    rows,
    rows_of,
)
from towers.divide.probes import Dim, Probes

Dims = Sequence[Dim]


class Look:
    """An operation as rules see it. Inputs and outputs are given by their index."""

    def __init__(self, op: Op, probes: Probes, is_inside: bool = False) -> None:
        """is_inside: whether it is in a loop or a condition, where towers cannot meet."""
        self.op, self.type, self.probes, self.is_inside = op, op.type, probes, is_inside
        self.inputs, self.outputs = op.inputs, op.outputs

    def attr(self, name: str) -> Any:
        """Returns an attribute; text is a str."""
        found = self.op.source.get_attr(name)
        return found.decode() if isinstance(found, bytes) else found

    def fact(self, i: int) -> Fact:
        """Returns what is known of an input. A size counts as a value that is there once."""
        found = self.inputs[i].fact
        return ONCE if found == SIZE else found

    def facts(self) -> list[Fact]:
        """Returns `fact` of all inputs."""
        return [self.fact(i) for i in range(len(self.inputs))]

    def is_size(self, i: int) -> bool:
        """Returns whether an input follows from shapes and constants alone."""
        return self.inputs[i].fact == SIZE

    def dims(self, i: int) -> Any:
        """Returns the sizes of an input's axes, or None if they are not known."""
        return self.probes.dims(self.inputs[i])

    def out(self, i: int = 0) -> Any:
        """Returns the sizes of an output's axes, or None if they are not known."""
        return self.probes.dims(self.outputs[i])

    def const(self, i: int) -> Any:
        """Returns the value of an integer input that no batch size changes, or None."""
        return self.probes.const(self.inputs[i]) if self.is_size(i) else None

    def values(self, i: int) -> list[Any] | None:
        """Returns the values of an integer input at the probes, or None."""
        return self.probes.values(self.inputs[i]) if self.is_size(i) else None

    # Answers of rules.

    def each(self, needs: Sequence[Need], *facts: Fact, **more: Any) -> Each:
        """Answers that the operation runs in every tower. One fact serves all outputs."""
        assert len(needs) == len(self.inputs)
        found = list(facts) if len(facts) > 1 else [facts[0]] * len(self.outputs)
        return Each(list(zip(self.inputs, needs, strict=True)), found, **more)

    def own_first(self, fact: Fact | None = None, **more: Any) -> Each:
        """Answers that towers use their own first input and whole other inputs."""
        others = [WHOLE] * (len(self.inputs) - 1)
        return self.each([OWN, *others], fact or self.fact(0), **more)

    def linear(self) -> Each | None:
        """Answers that parts of the first input make parts of the result, if others are whole."""
        others_whole = all(f == ONCE for f in self.facts()[1:])
        return self.own_first(PART) if self.fact(0) == PART and others_whole else None

    def only_rows_axis(self) -> int | None:
        """Returns the axis of the first output that counts rows, if just one depends on them."""
        return self.probes.rows_axis(self.outputs[0])


Rule = Callable[[Look], Each | None]
RULES: dict[str, Rule] = {}


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Adds a rule to the table, for these types of operations."""

    def add(function: Rule) -> Rule:
        for each in types:
            assert each not in RULES, each
            RULES[each] = function
        return function

    return add


def align(look: Look, indices: Sequence[int], result: int = 0) -> Each | None:
    """Answers for inputs that are broadcast with each other, as in x + y.

    The rows of one input become the rows of the result. Other inputs with as many rows along that
    axis give theirs; inputs without that axis are whole. Parts are added up before.
    """
    out = look.out(result)
    dims = {i: look.dims(i) for i in indices}
    if out is None or any(found is None for found in dims.values()):
        return None
    first = next((i for i in indices if look.fact(i).kind == "rows"), None)
    if first is None:
        return None
    axis = look.fact(first).axis + len(out) - len(dims[first])
    if out[axis] != dims[first][look.fact(first).axis]:
        return None
    needs = [OWN if fact == EACH else WHOLE for fact in look.facts()]
    for i in indices:
        own = axis - (len(out) - len(dims[i]))
        if own >= 0 and dims[i][own] == out[axis]:
            needs[i] = rows_of(own)
        elif own >= 0 and set(dims[i][own]) != {1}:
            return None
    return look.each(needs, rows(axis))


def contract(look: Look, terms: Sequence[str], result: str) -> Each | None:
    """Answers for a product of tensors, given the labels of their axes, as in Einsum.

    A label in the result keeps its rows; a label that is summed over makes parts. A tensor with
    rows along another label is gathered.
    """
    facts = look.facts()
    if facts.count(PART) == 1 and facts.count(ONCE) == len(facts) - 1:
        return look.each([OWN if f == PART else WHOLE for f in facts], PART)
    dims = [look.dims(i) for i in range(len(terms))]
    first = next((i for i, f in enumerate(facts) if f.kind == "rows"), None)
    if first is None or any(found is None for found in dims):
        return None
    label = terms[first][facts[first].axis]
    size = dims[first][facts[first].axis]
    needs = []
    for term, found in zip(terms, dims, strict=True):
        if term.count(label) > 1 or label in term and found[term.index(label)] != size:
            return None
        needs.append(rows_of(term.index(label)) if label in term else WHOLE)
    return look.each(needs, rows(result.index(label)) if label in result else PART)


def kept_axes(dims: Dims, axes: Any) -> set[int]:
    """Returns axes, which may be negative or a single one, as non-negative integers."""
    return {int(axis) % len(dims) for axis in np.atleast_1d(axes)}
