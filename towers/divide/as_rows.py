"""Asks the rules of operations about inputs as if these were rows of the towers, in order."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from towers.divide.facts import (
    ONCE, OWN, PART, WHOLE, Each, Fact, Op, Value, rows, rows_of, shape_of,
)  # fmt: skip
from towers.divide.flat import new_op
from towers.divide.probes import Dim, Probes
from towers.divide.rule import FIRST

Ask: TypeAlias = Callable[[Op], Each | None]


def cut_again(op: Op, probes: Probes, ask: Ask) -> Each | None:
    """Returns how towers run an operation on their rows of whole values, or None.

    ask: gives the answer of the table's rule.
    """
    axes = {value: probes.rows_axis(value) for value in op.inputs if value.fact == ONCE}
    # Show rows to the rule where a whole value has as many rows as the batch.
    shown = {value: rows(axis) for value, axis in axes.items() if axis is not None}
    answer = _answer(op, probes, ask, shown)
    if answer is not None:
        answer.needs = [
            (value, rows_of(shown[value].axis) if value in shown and need == OWN else need)
            for value, need in answer.needs
        ]
    return answer


def in_blocks(op: Op, probes: Probes, ask: Ask) -> Each | None:
    """Returns how towers run an operation on rows in blocks, or None.

    They run it as on rows in order, if it changes each row alone, or adds rows up.
    """
    facts = {value.fact for value in op.inputs if value.fact.kind == "blocks"}
    shown = {value: FIRST for value in op.inputs if value.fact in facts}
    answer = _answer(op, probes, ask, shown) if len(facts) == 1 else None
    if answer is None:
        return None
    for value, need in answer.needs:
        # Other values with as many rows have them in order.
        if need not in ((OWN, rows_of(0)) if value in shown else (WHOLE, shape_of(0))):
            return None
    counts = {_num_rows(value, probes) for value in shown}
    for i, (value, fact) in enumerate(zip(op.outputs, answer.facts, strict=True)):
        if fact == FIRST and {_num_rows(value, probes)} == counts:
            answer.facts[i] = next(iter(facts))
        elif fact != PART:
            return None
    answer.needs = [(value, OWN if value in shown else need) for value, need in answer.needs]
    return answer


def _num_rows(value: Value, probes: Probes) -> Dim | None:
    """Returns the size of axis 0 at the probes, or None without such an axis."""
    dims = probes.dims(value)
    return dims[0] if dims else None


def _answer(op: Op, probes: Probes, ask: Ask, shown: Mapping[Value, Fact]) -> Each | None:
    """Returns what the rule would say if these inputs had other facts."""
    inputs, cuts = op.inputs, {}
    for value, fact in shown.items():
        cuts[value] = new_op("Identity", op.source, [value], [value]).outputs[0]
        cuts[value].fact = fact
        probes.alias(cuts[value], value)
    op.inputs = [cuts.get(value, value) for value in inputs]
    answer = ask(op)
    # The rule has answered about the cuts; the operation reads the values behind them.
    op.inputs, behind = inputs, {cut: value for value, cut in cuts.items()}
    if answer is not None:
        answer.needs = [(behind.get(value, value), need) for value, need in answer.needs]
    return answer
