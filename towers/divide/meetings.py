"""Runs what runs once: the update, metrics, and what no rule divides."""

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import tensorflow as tf

from towers.divide.compiling import draws_from_seed, is_known
from towers.divide.context import Context, Place, roots
from towers.divide.facts import SIZE, WHOLE, Need, Op, Value
from towers.divide.flat import inputs_of, outputs_of
from towers.divide.phases import states_before
from towers.divide.run import Run
from towers.machine.devices import short_name
from towers.step.averaging import Tree, add_tree

ASSIGNMENTS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
Parts: TypeAlias = tuple[list[Op], list[Op], list[Op]]  # before, in and after the program
_LARGE = 4096  # elements; what is smaller takes little time, and compiling it takes as much as any


class Program:
    """Operations that XLA compiles as one program, with the additions of the sums they read."""

    def __init__(self, ops: Sequence[Op], read_after: Collection[Value]) -> None:
        """read_after: the values that other operations read."""
        self.ops = list(ops)
        made = outputs_of(ops)
        own = set(made)
        self._outputs = [value for value in made if value in read_after]
        outside = dict.fromkeys(value for value in inputs_of(ops) if value.fact != SIZE)
        inputs = [value for value in outside if value not in own]
        self._states = [value for value in inputs if value.dtype == tf.resource]
        self.inputs = [value for value in inputs if value.dtype != tf.resource]

    def call(
        self, context: Context, device: str, tree: Callable[[Value], Tree], compiles: bool
    ) -> None:
        """Computes the values and the effects in a context, on its device.

        tree: gives what remains of a value's additions, or [the value]. compiles: by XLA, or not.
        """
        states = {value: context.read(value, WHOLE) for value in self._states}
        is_here = all(short_name(v.device) == short_name(device) for v in states.values())
        if not (compiles and is_here):  # XLA compiles for one device
            context.run(self.ops)
            return

        def update(place: Place, trees: list[Tree]) -> list[tf.Tensor]:
            found = {v: add_tree(tree)[0] for v, tree in zip(self.inputs, trees, strict=True)}

            def find(value: Value, need: Need) -> tf.Tensor:
                if value in states:
                    return states[value]
                return found[value]

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

    ops: the operations before, in and after the program. read: the values that they read.
    """

    def __init__(self, parts: Parts, read_outside: Collection[Value]) -> None:
        """read_outside: the values of the program that operations outside of it read."""
        self.before, compiled, self.after = parts
        self.program = Program(compiled, read_outside)
        self.ops = [*self.before, *compiled, *self.after]
        self.read = inputs_of(self.ops)

    @classmethod
    def of(cls, ops: Sequence[Op], read_after: Collection[Value]) -> "Meeting":
        """Returns a meeting; read_after: the values that operations of other phases read."""
        parts = divided_for_xla(ops)
        return cls(parts, {*inputs_of(parts[2]), *read_after})

    def call(self, run: Run) -> None:
        """Computes the values and the effects."""
        with tf.device(run.machine.home):
            run.add_up(self.read)
            run.whole.run(self.before)
            compiles = run.machine.compiles_update
            self.program.call(run.whole, run.machine.home, run.additions, compiles)
            run.whole.run(self.after)


def divided_for_xla(ops: Sequence[Op]) -> Parts:
    """Divides operations, in their order, into those before, in and after the compiled program."""
    before_of = states_before(ops)
    before: list[Op] = []
    program: list[Op] = []
    after: list[Op] = []
    place: dict[Op, list[Op]] = {}
    for op in ops:
        awaited = [place.get(o) for o in (*before_of[op], *(value.op for value in op.inputs))]
        is_behind = any(found is program for found in awaited)
        # An operation that waits for one after the program comes after the program, too. XLA
        # compiles what is large, and what reads its results: compiling takes time.
        if any(found is after for found in awaited):
            place[op] = after
        elif (is_behind or _is_large(op)) and _compiles(op):
            place[op] = program
        else:
            place[op] = after if is_behind else before
        place[op].append(op)
    # Without an update, the program would only copy large values in and out.
    is_update = any(op.type in ASSIGNMENTS for op in program)
    if is_update:
        return (before, program, after)
    return (list(ops), [], [])


def _is_large(op: Op) -> bool:
    """Returns whether an operation reads or makes a large tensor."""
    return any((v.shape.num_elements() or 0) >= _LARGE for v in (*op.inputs, *op.outputs))


def _compiles(op: Op) -> bool:
    """Returns whether XLA compiles an operation, once for all batches. It would draw other noise."""
    inputs_known = all(map(_has_known_shape, (*op.inputs, *op.outputs)))
    return inputs_known and is_known(op.source) and not draws_from_seed(op.source)


def _has_known_shape(value: Value) -> bool:
    if value.fact == SIZE:
        return not roots(value)
    return value.dtype == tf.resource or value.shape.is_fully_defined()
