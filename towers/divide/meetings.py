"""Runs what runs once: the update, metrics, and what no rule divides."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from towers.divide.compiling import is_known
from towers.divide.context import Context, Place, roots
from towers.divide.facts import PART, SIZE, WHOLE, Need, Op, Value
from towers.divide.phases import states_before
from towers.divide.run import Run
from towers.machine.devices import short_name
from towers.step.averaging import Tree, add_tree

ASSIGNMENTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
_LARGE = 4096  # elements; what is smaller takes little time, and compiling it takes as much as any


class Program:
    """Operations that XLA compiles as one program, with the additions of the sums they read."""

    def __init__(self, ops: Sequence[Op], read_after: Collection[Value]) -> None:
        """read_after: the values that other operations read."""
        self.ops = list(ops)
        own = {value for op in ops for value in op.outputs}
        self._outputs = [value for op in ops for value in op.outputs if value in read_after]
        outside = (value for op in ops for value in op.inputs if value not in own)
        inputs = [value for value in dict.fromkeys(outside) if value.fact != SIZE]
        self._states = [value for value in inputs if value.dtype == tf.resource]
        self.inputs = [value for value in inputs if value.dtype != tf.resource]

    def call(self, context: Context, device: str, tree: Callable[[Value], Tree]) -> None:
        """Computes the values and the effects in a context, on its device.

        tree: gives what remains of the additions of a value; without any, [the value].
        """
        states = {value: context.read(value, WHOLE) for value in self._states}
        if any(short_name(state.device) != short_name(device) for state in states.values()):
            context.run(self.ops)  # XLA compiles for one device
            return

        def update(place: Place, trees: list[Any]) -> list[Any]:
            found = {v: add_tree(tree)[0] for v, tree in zip(self.inputs, trees, strict=True)}

            def find(value: Value, need: Need) -> Any:
                return states[value] if value in states else found[value]

            inner = context.inside(place, find)
            inner.run(self.ops)
            return [inner.values[value] for value in self._outputs]

        if self.ops:
            compiled = tf.function(update, autograph=False, jit_compile=True)
            results = compiled(context.place, list(map(tree, self.inputs)))
            context.values.update(zip(self._outputs, results, strict=True))


class Meeting:
    """Computes on whole values, on the parameter device.

    The update of large parameters, with what remains of the additions, is one program.
    """

    def __init__(self, ops: Sequence[Op], read_after: Collection[Value]) -> None:
        """read_after: the values that operations of other phases read."""
        self._before, compiled, self._after = divided_for_xla(ops)
        self._read = [value for op in ops for value in op.inputs]
        read = {value for op in self._after for value in op.inputs} | set(read_after)
        self._program = Program(compiled, read)

    def call(self, run: Run) -> None:
        """Computes the values and the effects."""
        home = run.machine.home

        def tree(value: Value) -> Tree:
            return run.tree(value) if value.fact == PART else [run.whole.read(value, WHOLE)]

        with tf.device(home):
            run.add_up(self._read)
            run.whole.run(self._before)
            self._program.call(run.whole, home, tree)
            run.whole.run(self._after)


def divided_for_xla(ops: Sequence[Op]) -> tuple[list[Op], list[Op], list[Op]]:
    """Divides operations, in their order, into those before, in and after the compiled program."""
    before_of = states_before(ops)
    before: list[Op] = []
    program: list[Op] = []
    after: list[Op] = []
    place: dict[Op, list[Op]] = {}
    for op in ops:
        awaited = [place.get(o) for o in (*before_of[op], *(value.op for value in op.inputs))]
        if any(found is after for found in awaited):
            place[op] = after
        else:
            is_behind = any(found is program for found in awaited)
            if (is_behind or _is_large(op)) and _compiles(op):
                place[op] = program
            else:
                place[op] = after if is_behind else before
        place[op].append(op)
    is_update = any(op.type in ASSIGNMENTS for op in program)
    return (before, program, after) if is_update else (list(ops), [], [])


def _is_large(op: Op) -> bool:
    """Returns whether an operation reads or makes a large tensor."""
    return any((v.shape.num_elements() or 0) >= _LARGE for v in (*op.inputs, *op.outputs))


def _compiles(op: Op) -> bool:
    """Returns whether XLA compiles an operation, once for all batches."""
    inputs_known = all(map(_has_known_shape, (*op.inputs, *op.outputs)))
    return inputs_known and is_known(op.source)


def _has_known_shape(value: Value) -> bool:
    if value.fact == SIZE:
        return not roots(value)
    return value.dtype == tf.resource or value.shape.is_fully_defined()
