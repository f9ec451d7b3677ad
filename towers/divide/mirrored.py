"""Runs the update of a meeting on several devices, for variables that have copies there.

first device    all that runs once: metrics, moving averages, scalars, the update
mirrored        other devices update their copies, from the same sums and scalars
sharded         each device updates what it owns, and sends parameters to the others
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.divide.context import Context
from towers.divide.copies import Copies
from towers.divide.device_sums import sums_everywhere, sums_on
from towers.divide.facts import PART, WHOLE, Need, Op, Value
from towers.divide.flat import CONDITIONS, flatten, has_effects, inputs_of, outputs_of
from towers.divide.meetings import ASSIGNMENTS, Meeting, Parts, Program
from towers.divide.phases import states_before
from towers.divide.repeatable import all_operations
from towers.divide.run import Run
from towers.machine.tensorflow_internals import called_graphs
from towers.step.averaging import Tree
from towers.step.transfers import spread

_READS = ("ReadVariableOp", "VariableShape")


def _assigns(op: Op) -> bool:
    return bool(op.states) and has_effects(op)


def _runs_anywhere(op: Op) -> bool:
    """Returns whether an operation may run on every device: it does nothing but assign."""
    return all(
        not each.op_def.is_stateful
        or each.type in (*ASSIGNMENTS, *_READS, "Placeholder", "While", "If")
        or each.type.startswith("ResourceScatter")
        for each in all_operations([op.source])
    )


def copied_variables(
    copies: Copies, meetings: Sequence[Sequence[Op]], programs: Collection[Op],
    variables: Mapping[Value, tf.Variable],
) -> dict[Value, tf.Variable]:  # fmt: skip
    """Returns the variables that are updated on several devices, by the values of their handles.

    meetings: the operations that run once. programs: the operations that XLA compiles.
    variables: all variables of the trace.
    """
    copied = {value: v for value, v in variables.items() if copies.may_copy(v)}
    copied |= {v: variables[v] for op in programs for v in op.states}
    assigning = [op for ops in meetings for op in ops if _assigns(op)]
    # An operation that may run only once, such as one that calls Python, changes variables on the
    # first device alone. These have no copies. An operation that changes one of them and others
    # then runs once, too, so the others lose their copies.
    while True:
        lost = {
            value
            for op in assigning
            if not (_runs_anywhere(op) and all(value in copied for value in op.states))
            for value in op.states
            if value in copied
        }
        if not lost:
            break
        copied = {value: v for value, v in copied.items() if value not in lost}
    changed = {value for op in assigning for value in op.states}
    return {value: v for value, v in copied.items() if value in changed or copies.has(v)}


class Owned(NamedTuple):
    """Says which variables a device updates, by the values of their handles.

    updated: the variables that this device updates. of_others: the variables that other devices
    update. home: the device of all other variables.
    """

    updated: Collection[Value]
    of_others: Collection[Value]
    home: str


def closure(
    ops: Sequence[Op], owned: Owned, *, has_scalars: bool, read: set[Value] | None = None
) -> list[Op]:
    """Returns the operations that assign to a device's own variables, with what they need.

    read: the values that later operations of the device read; gets those that these read.
    has_scalars: whether scalars, and reads of variables that do not change, are among them.
        Otherwise they, like all that may not run on every device, come from the first device.
    """
    wanted: set[Op] = set()
    read = set() if read is None else read
    # From the end: the assignments to own variables, and then what these read.
    for op in reversed(ops):
        states = op.states
        assigns = _assigns(op) and any(value in owned.updated for value in states)
        if not _runs_anywhere(op):
            continue
        # A scalar, such as the norm of all gradients, is cheaper to receive than to compute.
        if has_scalars:
            is_needed = all(value not in owned.of_others for value in states)
        else:
            is_scalar = all(value.shape.num_elements() == 1 for value in op.outputs)
            is_needed = not is_scalar and all(value in owned.updated for value in states)
        is_needed = is_needed and not _assigns(op) and not read.isdisjoint(op.outputs)
        if assigns or is_needed:
            wanted.add(op)
            read.update(op.inputs)
    return [op for op in ops if op in wanted]


def owned_once(owned: Owned) -> Callable[[Context, Op], list[tf.Tensor | None]]:
    """Returns what emits an update of those variables alone that a device owns."""

    def branch_of(op: Op, name: str) -> list[Op]:
        """Returns those operations of a branch that the device runs."""
        (graph,) = called_graphs(op.source, name)
        pairs = zip(graph.inputs, op.inputs[1:], strict=True)
        ops, _ = flatten(graph, {id(tensor): value for tensor, value in pairs})
        return closure(ops, owned, has_scalars=True)

    def once(context: Context, op: Op) -> list[tf.Tensor | None]:
        if all(value in owned.updated for value in op.states):
            return context.once(op)
        if op.type not in CONDITIONS:
            with tf.device(owned.home):
                return context.once(op)

        # A condition around the update, as of a LossScaleOptimizer, changes all variables. This
        # device makes another condition, whose branches change its own ones.
        branches = [branch_of(op, name) for name in ("then_branch", "else_branch")]
        read = [value for ops in branches for each in ops for value in each.inputs]
        given = {v: context.read(v, WHOLE) for v in dict.fromkeys(read) if v in op.inputs}

        def run(ops: Sequence[Op]) -> tf.Tensor:
            context.inside(context.place, lambda value, need: given[value]).run(ops)
            return tf.constant(0)

        is_true = context.read(op.inputs[0], WHOLE)
        tf.cond(is_true, *(functools.partial(run, ops) for ops in branches))
        return [None] * len(op.outputs)

    return once


class _Piece:
    """Holds the operations of a meeting that one device runs."""

    def __init__(self, parts: Parts, owned: Owned, has_scalars: bool) -> None:
        """parts: the operations before, in and after the compiled program."""
        self.owned = owned
        before, compiled, after = parts
        read: set[Value] = set()
        self.after = closure(after, owned, has_scalars=has_scalars, read=read)
        # If the device updates all that the program does, it runs the program as it is. Otherwise
        # it leaves out what other devices update.
        if all(value in owned.updated for op in compiled for value in op.states):
            program = list(compiled)
            read.update(inputs_of(program))
        else:
            program = closure(compiled, owned, has_scalars=True, read=read)
        self.before = closure(before, owned, has_scalars=has_scalars, read=read)
        self.program = Program(program, set(inputs_of(self.after)))
        self.ops = [*self.before, *program, *self.after]
        own = set(outputs_of(self.ops))
        self.received = dict.fromkeys(v for v in inputs_of(self.ops) if v not in own)
        self.sums = [value for value in self.received if value.fact == PART]


class MirroredMeeting:
    """A meeting whose update of copied variables runs on several devices."""

    def __init__(
        self, ops: Sequence[Op], read_after: Collection[Value], copies: Copies,
        copied: Mapping[Value, tf.Variable],
    ) -> None:  # fmt: skip
        """copied: the variables with copies, by the values of their handles."""
        self._copies, self._copied = copies, copied
        self.late: Op | None = None  # reads what another device updates, which it sends later
        self._whole = self._first = Meeting.of(ops, read_after)  # all; what the first device runs
        parts = self._whole.before, self._whole.program.ops, self._whole.after
        self._pieces: dict[int, _Piece] = {}  # by the index of a device
        if not any(_assigns(op) and set(op.states) & set(copied) for op in ops):
            return
        # Most scalars, such as a norm of all gradients, are computed once. If that would come too
        # late for a device, it computes all that it needs.
        self._make_pieces(parts, has_scalars=False)
        if not copies.is_sharded:
            return
        if self._reads_too_early(read_after):
            self._make_pieces(parts, has_scalars=True)
            self.late = self._reads_too_early(read_after)
        kept = self._kept(read_after)
        read = {*inputs_of(kept), *read_after}
        before, program, after = ([op for op in part if op in kept] for part in parts)
        self._first = Meeting((before, program, after), read)

    def _make_pieces(self, parts: Parts, has_scalars: bool) -> None:
        """parts: the operations before, in and after the compiled program."""
        devices, copied = self._copies.devices, self._copied
        for k in range(int(not self._copies.is_sharded), len(devices)):
            own = {value for value, v in copied.items() if self._copies.is_updated_on(k, v)}
            owned = Owned(own, copied.keys() - own, devices[0])
            self._pieces[k] = _Piece(parts, owned, has_scalars)

    def _kept(self, read_after: Collection[Value]) -> set[Op]:
        """Returns the operations that no piece runs, and those whose results others read."""
        of_pieces = {op for piece in self._pieces.values() for op in piece.ops}
        received = {value for piece in self._pieces.values() for value in piece.received}
        kept, read = set(), received | set(read_after)
        for op in reversed(self._whole.ops):
            if op not in of_pieces or not _assigns(op) and not read.isdisjoint(op.outputs):
                kept.add(op)
                read.update(op.inputs)
        return kept

    def _reads_too_early(self, read_after: Collection[Value]) -> Op | None:
        """Returns an operation of the first device that reads what a piece assigns later."""
        kept, assigned = self._kept(read_after), set[Value]()
        for op in self._whole.ops:
            if op in kept and not assigned.isdisjoint(op.states):
                return op
            if _assigns(op) and op not in kept:
                assigned.update(op.states)
        return None

    def call(self, run: Run) -> None:
        home, devices = run.machine.home, self._copies.devices
        if not run.machine.exchange.is_alone:
            run.add_up(self._whole.read)  # workers meet alike, however many devices each has
        contexts, first = self._contexts(run), self._first
        with tf.device(home):
            run.add_up(first.read)
            run.whole.run(first.before)
        self._read_copies(run, first.before)
        for k, piece in self._pieces.items():
            context = contexts[k]
            with tf.device(devices[k]):
                context.run(piece.before)
                tree = functools.partial(_as_tree, context)
                piece.program.call(context, devices[k], tree, run.machine.compiles_update)
        with tf.device(home):
            first.program.call(run.whole, home, run.additions, run.machine.compiles_update)
            run.whole.run(first.after)
        for k, piece in self._pieces.items():
            with tf.device(devices[k]):
                contexts[k].run(piece.after)
        if self._copies.is_sharded:
            self._send_parameters()
        self._read_copies(run, first.after)

    def _contexts(self, run: Run) -> dict[int, Context]:
        """Returns the context of each piece, which finds sums on its device."""
        if self._copies.is_sharded:
            sums = {k: sums_on(run, self._copies.devices[k], piece.sums)
                    for k, piece in self._pieces.items()}  # fmt: skip
        elif self._pieces:
            everywhere = sums_everywhere(run, self._copies.devices, self._pieces[1].sums)
            run.know(everywhere[0])
            sums = dict(enumerate(everywhere))

        def context_of(k: int, piece: _Piece) -> Context:
            def find(value: Value, need: Need) -> tf.Tensor:
                if value in self._copied:
                    return self._copies.of(self._copied[value])[k].handle
                if value in sums[k]:
                    return sums[k][value]
                return run.whole.read(value, need)

            return Context(run.whole.place, find, emit_once=owned_once(piece.owned))

        return {k: context_of(k, piece) for k, piece in self._pieces.items()}

    def _send_parameters(self) -> None:
        """Sends the parameters that each owner has updated to the other devices."""
        copies = self._copies
        for k, piece in self._pieces.items():
            changed = dict.fromkeys(v for op in piece.ops if _assigns(op) for v in op.states)
            parameters = [
                copies.of(self._copied[value])
                for value in changed
                if value in piece.owned.updated and copies.is_sent(self._copied[value])
            ]
            # Reads stand behind the update in the graph, so they see the new values.
            with tf.device(copies.devices[k]):
                values = [variables[k].read_value() for variables in parameters]
            others = [device for device in copies.devices if device != copies.devices[k]]
            arrived = spread(values, copies.devices[k], others, packed=copies.packed)
            for j, device in enumerate(copies.devices):
                with tf.device(device):
                    for variables, value in zip(parameters, arrived.get(device, ()), strict=False):
                        variables[j].assign(value, read_value=False)

    def _read_copies(self, run: Run, ops: Sequence[Op]) -> None:
        """Lets towers read the copies on their devices, where one value is read in this meeting."""
        copies = self._copies
        # Between two assignments, the first device sends a variable's value.
        assigned = {state for op in ops if _assigns(op) for state in op.inputs}
        for op in ops:
            variable = self._copied.get(op.inputs[0]) if op.type == "ReadVariableOp" else None
            if variable is None or copies.is_moved(variable) or op.inputs[0] in assigned:
                continue
            values = {copies.devices[0]: run.whole.read(op.outputs[0], WHOLE)}
            for device, copy in zip(copies.devices[1:], copies.of(variable)[1:]):
                with tf.device(device):
                    values[device] = copy.read_value()
            run.receive(op.outputs[0], values)


def mirrored_meetings(
    copies: Copies, copied: Mapping[Value, tf.Variable], is_alone: bool,
    ops: Sequence[Op], read_after: Collection[Value],
) -> list[MirroredMeeting]:  # fmt: skip
    """Returns a meeting, or several if operations read parameters that other devices have updated.

    An average of the weights does. Parameters are sent at the end of a meeting, so it is another
    meeting. is_alone: whether there is one worker. The others are arguments of `MirroredMeeting`.

    Raises ValueError if several workers would make them, which must meet alike on any devices.
    """
    meeting = MirroredMeeting(ops, read_after, copies, copied)
    if meeting.late is None:
        return [meeting]
    if not is_alone:
        raise ValueError(
            f"strategy=sharded: {meeting.late.source.name} reads what another device updates. Use "
            "strategy=mirrored, or one worker."
        )
    before, later = states_before(ops), {meeting.late}
    for op in ops:
        if not later.isdisjoint([*before[op], *(value.op for value in op.inputs)]):
            later.add(op)
    groups = [op for op in ops if op not in later], [op for op in ops if op in later]
    read = {*inputs_of(later), *read_after}
    meetings_of = functools.partial(mirrored_meetings, copies, copied, is_alone)
    return [*meetings_of(groups[0], read), *meetings_of(groups[1], read_after)]


def _as_tree(context: Context, value: Value) -> Tree:
    return [context.read(value, WHOLE)]
