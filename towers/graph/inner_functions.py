"""Functions, conditions and loops in a graph: facts of arguments -> of results."""

from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf

from towers.graph.axes import open_axis
from towers.graph.facts import SHARED, Fact, added, uneven
from towers.graph.row_by_row import Inputs, faulty, row_by_row

CALLS = (
    "PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile",
    "Case", "StatelessCase",
)
_MOST_ROUNDS = 4  # of a loop's body, until what is known of its variables stays

# (operation, attribute, facts of the function's arguments) -> of its results; None: not known.
Call = Callable[[tf.Operation, str, Inputs], list[Fact] | None]


def called(operation: tf.Operation, facts: Inputs, call: Call) -> list[Fact]:
    """A call of a function, a condition, or a loop."""
    kind = operation.type
    if kind in ("While", "StatelessWhile"):
        return _looped(operation, facts, call)
    if kind in ("If", "StatelessIf"):
        branches = [call(operation, name, facts[1:]) for name in ("then_branch", "else_branch")]
        results: list[Fact] | None = None
        if branches[0] is not None and branches[1] is not None:
            results = [_either(operation, pair) for pair in zip(*branches)]
        return _decided(operation, facts, results)
    known = call(operation, "f", facts) if kind in ("PartitionedCall", "StatefulPartitionedCall") \
        else None
    return known or [row_by_row(operation, facts, output) for output in operation.outputs]


def _either(operation: tf.Operation, pair: tuple[Fact, Fact]) -> Fact:
    """The fact of one branch's value or the other's."""
    fact = added(operation, pair)
    return replace(fact, each=None) if None in [f.each for f in pair] else fact


def _decided(operation: tf.Operation, facts: Inputs, results: list[Fact] | None) -> list[Fact]:
    """The fact of a tf.cond's result."""
    results = results or [row_by_row(operation, facts[1:], output) for output in operation.outputs]
    if facts[0].degree != 0 and not facts[0].local:
        return [
            replace(fact, fault=fact.fault or uneven(operation)) if fact.local else fact
            for fact in results
        ]
    if facts[0].local:
        return [
            faulty(operation, replace(fact, local=True), "(tf.cond) decides by a value that is "
                   "made of all rows of the batch") for fact in results
        ]
    return results


def _looped(operation: tf.Operation, facts: Inputs, call: Call) -> list[Fact]:
    """Rounds of the body, where a value without rows comes out, until its variables stay."""
    rough = [
        SHARED if not output.dtype.is_floating and open_axis(output) is None
        and output.dtype != tf.variant else row_by_row(operation, facts, output)
        for output in operation.outputs
    ]
    if not any(fact.fault and not fact.has_rows for fact in rough):
        return rough
    before = list(facts)
    for _ in range(_MOST_ROUNDS):
        after = call(operation, "body", before)
        if after is None:
            break
        merged = [_merged(a, b) for a, b in zip(before, after)]
        if merged == before:
            return [
                b if known.fault and a == b else known
                for a, b, known in zip(before, after, rough)
            ]
        before = merged
    return rough


def _merged(before: Fact, after: Fact) -> Fact:
    """The fact of a loop's variable that was `before` a round and is `after` it."""
    is_mean = before == SHARED and after.is_value and after.degree == 0
    return after if before.zero or is_mean or after.fault and not before.fault else before
