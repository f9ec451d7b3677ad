"""Rules of loops and conditions, by what is in them, to a fixed point.

A loop runs in every tower if no operation in it needs the rows of other towers. Its gradient is a
loop too, and is judged in the same way. Any other loop runs once.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import tensorflow as tf

from towers.divide.composites import fills_or_sums
from towers.divide.context import Context, reads
from towers.divide.facts import (
    EMPTY, ONCE, SAME, SIZE, SIZES, WHOLE, Each, Elements, Fact, Need, Op, Shapes, Tensors, Value,
    rows,
)  # fmt: skip
from towers.divide.flat import CONDITIONS, LOOPS, flatten, has_effects, live, new_op, outputs_of
from towers.divide.lists import LISTS, joined, need_for
from towers.divide.tables import TABLES
from towers.divide.probes import Probes
from towers.divide.rule import Look
from towers.machine.tensorflow_internals import called_graphs

_MOST_ROUNDS = 8


class LoopAnalysis(Protocol):
    """Has the parts of an `Analysis` that the rules of loops use; its module imports this one."""

    probes: Probes
    forced: Collection[str]
    is_inside: bool

    def read_before(self, op: Op) -> Value: ...

    def place_inside(self, ops: Sequence[Op]) -> None: ...


def has_own_shapes(op: Op) -> bool:
    """Returns whether only a rule outside of `probes` knows the results' shapes."""
    has_list = any(value.dtype == tf.variant for value in (*op.inputs, *op.outputs))
    return has_list or op.type in (*LOOPS, *CONDITIONS, *TABLES) or fills_or_sums(op)


def each_of(analysis: LoopAnalysis, op: Op) -> Each | None:
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


def shape_as_part(axis: int) -> Callable[..., Tensors]:
    """Returns the emission of a shape in parts: own sizes at an axis, else tower 0's sizes."""

    def emit(context: Context, op: Op, values: Tensors) -> Tensors:
        own = tf.shape(values[0], out_type=op.outputs[0].dtype)
        is_kept = tf.one_hot(axis, tf.size(own), True, False) | tf.equal(context.place.start, 0)
        return [tf.where(is_kept, own, tf.zeros_like(own))]

    return emit


def _argument(tensor: tf.Tensor, operation: tf.Operation) -> Value:
    """Returns a new value for an input of a body."""
    return new_op("Placeholder", operation, [], [tensor]).outputs[0]


def _inner(
    analysis: LoopAnalysis, graph: tf.Graph, given: Sequence[Value]
) -> tuple[list[Op], list[Value]]:
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
        if op.in_towers is None:
            needs = [(value, WHOLE) for value in op.inputs]
        else:
            needs = op.in_towers.needs
        for value, need in needs:
            kind = value.fact.kind
            is_met = need.kind in ("whole", "shape") and kind not in ("once", "size")
            is_split = kind == "part" or value.fact.has_rows
            is_moved = need.kind == "rows" and is_split and value.fact != rows(need.axis)
            if is_met or is_moved or need.kind == "part" and value.fact.has_rows:
                raise _NotInTowers


def _external(
    ops: Sequence[Op], own: Iterable[Value], ends: Sequence[tuple[Value, Need]]
) -> list[tuple[Value, Need]]:
    """Returns (value, need) pairs that bodies read from outside. ends: the pairs of the results."""
    inside = {*own, *outputs_of(ops)}
    result = Op("", "", ops[0].source if ops else None, [], [], Each(list(ends), []))
    found = [pair for op in (*ops, result) for pair in reads(op) if pair[0] not in inside]
    return list(dict.fromkeys(found))


class _LoopVariable(NamedTuple):
    """Holds what is known of a loop variable in all rounds; elements: of a list."""

    fact: Fact
    shapes: Shapes | None  # at the probes
    elements: Elements


def _loop(analysis: LoopAnalysis, op: Op) -> Each | None:
    bodies, conditions = called_graphs(op.source, "body"), called_graphs(op.source, "cond")
    if not bodies or not conditions:
        return None
    body, condition = bodies[0], conditions[0]
    # A value that the body passes on unchanged is no variable. A size may be another one in each round, so
    # it no longer follows from shapes alone.
    variables = {}
    for i, (start, end) in enumerate(zip(body.inputs, body.outputs)):
        if start is not end:
            value = op.inputs[i]
            fact = ONCE if value.fact == SIZE else value.fact
            variables[i] = _LoopVariable(fact, analysis.probes.shapes(value), value.elements)
    try:
        # A variable has rows in a round if it has them after the round before. So look at the body
        # again until no fact changes.
        for _ in range(_MOST_ROUNDS):
            inputs = list(op.inputs)
            for i, variable in variables.items():
                inputs[i] = _argument(body.inputs[i], op.source)
                inputs[i].fact, inputs[i].elements = variable.fact, variable.elements
                inputs[i].op.in_towers = Each([], [variable.fact])
                analysis.probes.feed(inputs[i], variable.shapes)
            ops, outputs = _inner(analysis, body, inputs)
            before = str(list(variables.values()))
            for i, variable in variables.items():
                meet = _met_lists if inputs[i].dtype == tf.variant else _met
                variables[i] = meet(analysis, variable, inputs[i], outputs[i])
            if before == str(list(variables.values())):
                break
        else:
            return None
        _check(ops)
        tests, (test,) = _inner(analysis, condition, inputs)
        _check(tests)
    except _NotInTowers:
        return None
    # A test of a tower's own values would end the loop in different rounds.
    if test.fact not in (ONCE, SIZE):
        return None
    ends = [outputs[i] for i in variables]
    return _emitted_loop(op, variables, inputs, (ops, ends), (tests, test), body)


def _met(
    analysis: LoopAnalysis, variable: _LoopVariable, argument: Value, output: Value
) -> _LoopVariable:
    """Joins what is known of a loop variable before a round with what is known after it."""
    whole = [value for value in (argument, output) if value.fact in (ONCE, SIZE)]
    fact = joined(variable.fact, output.fact, analysis.probes, *whole)
    if fact is None:
        raise _NotInTowers
    if fact == SIZE:
        fact = ONCE
    shapes, after = variable.shapes, analysis.probes.shapes(output)
    if shapes is not None and str(after) != str(shapes):
        shapes = [tf.TensorShape(None)] * len(after)
    return _LoopVariable(fact, shapes, variable.elements)


def _met_lists(
    analysis: LoopAnalysis, variable: _LoopVariable, argument: Value, output: Value
) -> _LoopVariable:
    """Joins what is known of a list before a round with what is known after it."""
    fact = joined(variable.fact, output.fact, analysis.probes)
    before, after = variable.elements, output.elements
    if None not in (before.shapes, after.shapes) and str(before.shapes) != str(after.shapes):
        after = after._replace(shapes=None)
    # A list that begins and ends as empty has no elements that could be known.
    elements = before if after == Elements() and fact == EMPTY else after
    if fact == SAME and before.source not in (None, after.source):
        raise _NotInTowers
    if fact is None or fact == SAME and after.source is None:
        raise _NotInTowers
    if fact != SAME and before.source is not None and after.source is not None:
        sizes = [str(analysis.probes.values(value)) for value in (before.source, after.source)]
        if sizes[0] == sizes[1]:
            elements = elements._replace(source=before.source, shapes=before.shapes)
        else:
            elements = elements._replace(source=None)
    if fact == SIZES and elements.source is None:
        fact = ONCE
    return _LoopVariable(fact, variable.shapes, elements)


def _emitted_loop(
    op: Op,
    variables: Mapping[int, _LoopVariable],
    inputs: list[Value],
    body: tuple[list[Op], list[Value]],
    test: tuple[list[Op], Value],
    graph: tf.Graph,
) -> Each:
    """Answers that each tower runs the loop, with the same operations on its own values.

    variables: the loop variables that change. inputs: all of the body. body, test: operations, and what they
    result in.
    """
    arguments = [inputs[i] for i in variables]
    results = [
        (value, need_for(variable.fact, value))
        for value, variable in zip(body[1], variables.values(), strict=True)
    ]
    outside = _external([*body[0], *test[0]], arguments, [*results, (test[1], WHOLE)])
    starts = [(op.inputs[i], need_for(variables[i].fact, op.inputs[i])) for i in variables]
    invariants = [graph.inputs[i].shape for i in variables]

    def emit(context: Context, _: Op, values: Tensors) -> list[tf.Tensor | None]:
        found = dict(zip(outside, values[len(variables) :], strict=True))

        def inner(tensors: Sequence[tf.Tensor], ops: Sequence[Op]) -> Context:
            within = Context(context.place, lambda v, need: found[v, need])
            within.values.update(zip(arguments, tensors, strict=True))
            within.run(ops)
            return within

        def goes_on(*tensors: tf.Tensor) -> tf.Tensor:
            return inner(tensors, test[0]).read(test[1], WHOLE)

        def turn(*tensors: tf.Tensor) -> Tensors:
            within = inner(tensors, body[0])
            return [within.read(value, need) for value, need in results]

        last = tf.while_loop(goes_on, turn, values[: len(variables)], shape_invariants=invariants)
        ends = dict(zip(variables, last, strict=True))
        return [ends.get(i) for i in range(len(op.outputs))]

    # The other values pass through the loop unchanged.
    rest = [_LoopVariable(value.fact, None, Elements()) for value in inputs]
    facts, shapes, elements = zip(*[variables.get(i, rest[i]) for i in range(len(op.outputs))])
    return Each([*starts, *outside], list(facts), emit, list(shapes), list(elements))


def _condition(analysis: LoopAnalysis, op: Op) -> Each | None:
    """Answers for a condition of a whole value whose branches can run in the towers."""
    # Towers that decide by their own rows would take different branches.
    if op.inputs[0].fact not in (ONCE, SIZE):
        return None
    # Without anything divided, towers would all compute the same.
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
    # Each result has one fact, whichever branch is taken.
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

    def emit(context: Context, _: Op, values: Tensors) -> Tensors:
        found = dict(zip(outside, values[1:], strict=True))

        def branch(k: int) -> Tensors:
            within = Context(context.place, lambda v, need: found[v, need])
            within.run(branches[k][0])
            return [within.read(value, need) for value, need in ends[k]]

        return tf.cond(tf.cast(values[0], tf.bool), lambda: branch(0), lambda: branch(1))

    return Each([(op.inputs[0], WHOLE), *outside], facts, emit, shapes)
