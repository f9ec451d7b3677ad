"""Rules of loops and conditions, by what is in them, to a fixed point.

A loop runs in every tower if no operation in it needs the rows of other towers. Its gradient is a
loop too, and is judged in the same way. Any other loop runs once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from towers.divide.context import Context, reads
from towers.divide.facts import (
    EMPTY, ONCE, SAME, SIZE, SIZES, WHOLE, Each, Elements, Fact, Op, Value, rows,
)  # fmt: skip
from towers.divide.flat import CONDITIONS, LOOPS, flatten, has_effects, live, new_op
from towers.divide.lists import LISTS, joined, need_for
from towers.divide.tables import TABLES
from towers.divide.rule import Look
from towers.machine.tensorflow_internals import called_graphs

_MOST_ROUNDS = 8


def has_own_shapes(op: Op) -> bool:
    """Returns whether only a rule of this module, `lists` or `tables` knows the results' shapes."""
    has_list = any(value.dtype == tf.variant for value in (*op.inputs, *op.outputs))
    return has_list or op.type in (*LOOPS, *CONDITIONS, *TABLES)


def each_of(analysis: Any, op: Op) -> Each | None:
    """Returns how a list operation, a loop or a condition runs in every tower, or None."""
    if op.source.name in analysis.forced:
        return None
    if op.type in LOOPS:
        return _loop(analysis, op)
    if op.type in CONDITIONS:
        return _condition(analysis, op)
    answer = TABLES.get(op.type) or LISTS.get(op.type)
    if answer is not None:
        return answer(Look(op, analysis.probes, analysis.is_inside))
    return None


def shape_as_part(axis: int) -> Callable[..., list[Any]]:
    """Returns the emission of a shape in parts: own sizes at an axis, else tower 0's sizes."""

    def emit(context: Any, op: Op, values: list[Any]) -> list[Any]:
        own = tf.shape(values[0], out_type=op.outputs[0].dtype)
        is_kept = tf.one_hot(axis, tf.size(own), True, False) | tf.equal(context.place.start, 0)
        return [tf.where(is_kept, own, tf.zeros_like(own))]

    return emit


def _argument(tensor: tf.Tensor, operation: tf.Operation) -> Value:
    """Returns a new value for an input of a body."""
    return new_op("Placeholder", operation, [], [tensor]).outputs[0]


def _inner(analysis: Any, graph: Any, given: Sequence[Value]) -> tuple[list[Op], list[Value]]:
    """Flattens a body; variables are read before the loop, on the parameter device."""
    arguments = {id(t): v for t, v in zip(graph.inputs, given, strict=True)}
    ops, outputs = flatten(graph, arguments)
    if any(has_effects(op) for op in ops):
        raise _NotInTowers
    ops = live(ops, outputs)
    read: dict[Value, Value] = {}
    for op in ops:
        if op.type == "ReadVariableOp":
            read[op.outputs[0]] = analysis.read_before(op)
    ops = [op for op in ops if op.type != "ReadVariableOp"]
    for op in ops:
        op.inputs = [read.get(value, value) for value in op.inputs]
    analysis.place_inside(ops)
    return ops, [read.get(value, value) for value in outputs]


class _NotInTowers(Exception):
    """Says that a body has something that must run once."""


def _check(ops: Iterable[Op]) -> None:
    """Raises _NotInTowers if an operation needs values of other towers."""
    for op in ops:
        if op.each is None:
            needs = [(value, WHOLE) for value in op.inputs]
        else:
            needs = op.each.needs
        for value, need in needs:
            kind = value.fact.kind
            is_met = need.kind in ("whole", "shape") and kind not in ("once", "size")
            is_split = kind == "part" or value.fact.has_rows
            is_moved = need.kind == "rows" and is_split and value.fact != rows(need.axis)
            if is_met or is_moved or need.kind == "part" and value.fact.has_rows:
                raise _NotInTowers


def _external(ops: Sequence[Op], own: Iterable[Value], ends: Sequence[Any]) -> list[Any]:
    """Returns (value, need) pairs that bodies read from outside. ends: the pairs of the results."""
    inside = {*own, *(value for op in ops for value in op.outputs)}
    result = Op("", "", ops[0].source if ops else None, [], [], Each(list(ends), []))
    found = [pair for op in (*ops, result) for pair in reads(op) if pair[0] not in inside]
    return list(dict.fromkeys(found))


def _loop(analysis: Any, op: Op) -> Each | None:
    bodies, conditions = called_graphs(op.source, "body"), called_graphs(op.source, "cond")
    if not bodies or not conditions:
        return None
    body, condition = bodies[0], conditions[0]
    carried = [i for i, (a, b) in enumerate(zip(body.inputs, body.outputs)) if a is not b]
    facts = {i: op.inputs[i].fact for i in carried}
    for i in carried:
        if facts[i] == SIZE:
            facts[i] = ONCE
    shapes: dict[int, Any] = {i: analysis.probes.shapes(op.inputs[i]) for i in carried}
    elements = {i: op.inputs[i].elements for i in carried}
    try:
        for _ in range(_MOST_ROUNDS):
            given = list(op.inputs)
            for i in carried:
                given[i] = _argument(body.inputs[i], op.source)
                given[i].fact, given[i].elements = facts[i], elements[i]
                given[i].op.each = Each([], [facts[i]])
                analysis.probes.feed(given[i], shapes[i])
            ops, outputs = _inner(analysis, body, given)
            before = dict(facts), dict(elements), {i: str(shapes[i]) for i in carried}
            for i in carried:
                _meet(analysis, i, given[i], outputs[i], facts, shapes, elements)
            if before == (facts, elements, {i: str(shapes[i]) for i in carried}):
                break
        else:
            return None
        _check(ops)
        tests, (test,) = _inner(analysis, condition, given)
        _check(tests)
    except _NotInTowers:
        return None
    if test.fact not in (ONCE, SIZE):
        return None
    return _emitted_loop(op, carried, given, (ops, [outputs[i] for i in carried]), (tests, test),
                         facts, shapes, elements, body)  # fmt: skip


def _meet(
    analysis: Any,
    i: int,
    given: Value,
    output: Value,
    facts: dict[int, Fact],
    shapes: dict[int, Any],
    elements: dict[int, Elements],
) -> None:
    """Joins what is known of a loop variable before a round with what is known after it."""
    is_list = given.dtype == tf.variant
    whole = [] if is_list else [v for v in (given, output) if v.fact in (ONCE, SIZE)]
    fact = joined(facts[i], output.fact, analysis.probes, *whole)
    if not is_list and fact == SIZE:
        fact = ONCE
    if fact is None:
        raise _NotInTowers
    facts[i] = fact
    after = analysis.probes.shapes(output)
    if not is_list and str(after) != str(shapes[i]):
        shapes[i] = None if shapes[i] is None else [tf.TensorShape(None)] * len(after)
    if is_list:
        known, new = elements[i], output.elements
        both_known = known.shapes is not None and new.shapes is not None
        if both_known and str(known.shapes) != str(new.shapes):
            new = new._replace(shapes=None)
        # A list that begins and ends as empty has no elements that could be known.
        elements[i] = known if new == Elements() and fact == EMPTY else new
        if fact == SAME:
            elements[i] = new if known.source in (None, new.source) else Elements()
            if elements[i].source is None:
                raise _NotInTowers
        elif known.source is not None and new.source is not None:
            values = [analysis.probes.values(v) for v in (known.source, new.source)]
            same = str(values[0]) == str(values[1])
            elements[i] = elements[i]._replace(source=known.source if same else None)
            if same:
                elements[i] = elements[i]._replace(shapes=known.shapes)
        if fact == SIZES and elements[i].source is None:
            facts[i] = ONCE


def _emitted_loop(
    op: Op,
    carried: list[int],
    given: list[Value],
    body: tuple[list[Op], list[Value]],
    test: tuple[list[Op], Value],
    facts: dict[int, Fact],
    shapes: dict[int, Any],
    elements: dict[int, Elements],
    graph: Any,
) -> Each:
    """Answers that each tower runs the loop, with the same operations on its own values."""
    arguments = [given[i] for i in carried]
    results = [
        (value, need_for(facts[i], value)) for i, value in zip(carried, body[1], strict=True)
    ]
    outside = _external([*body[0], *test[0]], arguments, [*results, (test[1], WHOLE)])
    starts = [(op.inputs[i], need_for(facts[i], op.inputs[i])) for i in carried]
    invariants = [graph.inputs[i].shape for i in carried]

    def emit(context: Any, _: Op, values: list[Any]) -> list[Any]:
        found = dict(zip(outside, values[len(carried) :], strict=True))

        def inner(variables: Sequence[Any], ops: Sequence[Op]) -> Context:
            within = Context(context.place, lambda v, need: found[v, need])
            within.values.update(zip(arguments, variables, strict=True))
            within.run(ops)
            return within

        def goes_on(*variables: Any) -> Any:
            return inner(variables, test[0]).read(test[1], WHOLE)

        def turn(*variables: Any) -> list[Any]:
            within = inner(variables, body[0])
            return [within.read(value, need) for value, need in results]

        last = tf.while_loop(goes_on, turn, values[: len(carried)], shape_invariants=invariants)
        ends = dict(zip(carried, last, strict=True))
        return [ends.get(i) for i in range(len(op.outputs))]

    known = [shapes.get(i) for i in range(len(op.outputs))]
    return Each(
        [*starts, *outside], [facts.get(i, given[i].fact) for i in range(len(op.outputs))], emit,
        known, [elements.get(i) or Elements() for i in range(len(op.outputs))],
    )  # fmt: skip


def _condition(analysis: Any, op: Op) -> Each | None:
    """Answers for a condition of a whole value whose branches can run in the towers."""
    if op.inputs[0].fact not in (ONCE, SIZE):
        return None
    if all(value.fact in (ONCE, SIZE) for value in op.inputs):
        return None
    branches = []
    try:
        for name in ("then_branch", "else_branch"):
            graphs = called_graphs(op.source, name)
            if not graphs:
                return None
            branches.append(_inner(analysis, graphs[0], op.inputs[1:]))
            _check(branches[-1][0])
    except _NotInTowers:
        return None
    facts, shapes = [], []
    for first, second in zip(branches[0][1], branches[1][1], strict=True):
        whole = [v for v in (first, second) if v.fact in (ONCE, SIZE)]
        fact = joined(first.fact, second.fact, analysis.probes, *whole)
        if fact is None or first.dtype == tf.variant:
            return None
        facts.append(ONCE if fact == SIZE else fact)
        both = [analysis.probes.shapes(v) for v in (first, second)]
        shapes.append(both[0] if str(both[0]) == str(both[1]) else None)
    needs = [need_for(fact) for fact in facts]
    ends = [list(zip(outputs, needs, strict=True)) for _, outputs in branches]
    outside = _external([*branches[0][0], *branches[1][0]], [], [*ends[0], *ends[1]])

    def emit(context: Any, _: Op, values: list[Any]) -> list[Any]:
        found = dict(zip(outside, values[1:], strict=True))

        def branch(k: int) -> list[Any]:
            within = Context(context.place, lambda v, need: found[v, need])
            within.run(branches[k][0])
            return [within.read(value, need) for value, need in ends[k]]

        return tf.cond(tf.cast(values[0], tf.bool), lambda: branch(0), lambda: branch(1))

    return Each([(op.inputs[0], WHOLE), *outside], facts, emit, shapes)
