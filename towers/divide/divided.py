"""Runs one traced step, divided among towers.

        the trace of the whole batch                 analysis     towers or once?
    before   once    parameters are read
    0        towers  forward, backward               -->  parts of the loss and of the gradients
    1        once    one tree of additions, then the update
    2        towers  what reads the new weights ...

Even numbers are stages in the towers, odd ones are meetings on the parameter device.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from towers.divide.analysis import Analysis
from towers.divide.context import Context, Place, open_shape, reads, roots
from towers.divide.facts import EACH, ONCE, OWN, PART, SIZE, WHOLE, Need, Op, Value, rows
from towers.divide.flat import flatten, has_effects, live, new_op
from towers.divide.own_moments import Marked
from towers.divide.probes import ROWS
from towers.divide.ran_once import RunsOnce
from towers.machine.tensorflow_internals import KEEP_WHOLE
from towers.step.averaging import add_tree, partial_sums

Phases = dict[int, list[Op]]
_END = -2  # stands for the phase in which the results are read


class Divided:
    """A traced function of the whole batch that runs in towers and computes the same."""

    def __init__(
        self, function: Any, row_inputs: Collection[int], devices: Sequence[str], *,
        parameter_device: str = "/cpu:0", add_on_devices: bool = False,
        row_splits: Collection[int] = (), markers: Mapping[str, Marked] | None = None,
        takes_first: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            function: a concrete function, traced with an open number of rows.
            row_inputs: the indices of its inputs that hold the rows of the batch, along axis 0.
            devices: the device of each tower.
            parameter_device: where whole values are.
            add_on_devices: whether towers' devices add what they can.
            row_splits: the indices of its inputs that say where each ragged row begins, and where
                the last one ends.
            markers: the markers of statistics that each tower has for itself, by name.
            takes_first: whether such a statistic is tower 0's if it is read whole, instead of the
                average over all rows.
        """
        self._row_splits, self._markers, self._takes_first = row_splits, markers, takes_first
        self._function, self._devices, self._home = function, devices, parameter_device
        self._adds_on_devices = add_on_devices
        self._rows = sorted(row_inputs)
        self._analyse()
        self._phases = _phases(self.ops)
        read_in: dict[Value, set[int]] = defaultdict(set)
        for phase, ops in self._phases.items():
            for op in ops:
                for value, _ in reads(op):
                    read_in[value].add(phase)
        for value in self.outputs:
            for source in roots(value) if value.fact == SIZE else [value]:
                read_in[source].add(_END)
        self._stages = {
            phase: _Stage(ops, {value for value, read in read_in.items() if read - {phase}})
            for phase, ops in self._phases.items()
            if phase % 2 == 0
        }

    def _analyse(self) -> None:
        """Decides what runs in towers. Lists that turn out to be needed whole then run once."""
        forced: set[str] = set()
        while True:
            graph = self._function.graph
            self._given = [
                new_op("Placeholder", tensor.op, [], [tensor]).outputs[0] for tensor in graph.inputs
            ]
            arguments = {id(t): v for t, v in zip(graph.inputs, self._given, strict=True)}
            ops, self.outputs = flatten(graph, arguments)
            analysis = Analysis(forced, self._markers)
            for i, value in enumerate(self._given):
                if i in self._rows:
                    value.fact = rows(0)
                    analysis.probes.feed_rows(value)
                elif i in self._row_splits:
                    analysis.probes.feed(value, [[count + 1] for count in ROWS])
                else:
                    analysis.probes.feed_static(value)
            self.ops = analysis.place(live(ops, self.outputs))
            needed = _whole_lists(self.ops, self.outputs)
            if not needed:
                self.runs_once = RunsOnce(self.ops, analysis.probes)
                once = (op for op in self.ops if op.each is None)
                self.fixed_batch = list(filter(analysis.probes.has_fixed_batch, once))
                return
            forced |= needed

    @property
    def ran_once(self) -> list[Op]:
        """The operations that had the rows of towers and ran once, on whole values."""
        return [op for op in self.ops if op.each is None and any(map(_is_divided, op.inputs))]

    def __call__(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Runs the step within the caller's tf.function; returns the function's flat outputs."""
        captured = self._function.captured_inputs
        given = dict(zip(self._given, [*arguments, *captured], strict=True))
        with tf.device(self._home):
            batch = self._given[self._rows[0]] if self._rows else None
            run = _Run(
                given, batch, self._devices, self._home, self._adds_on_devices, self._takes_first
            )
        for phase, ops in sorted(self._phases.items()):
            if phase % 2 == 0:
                self._stages[phase].call(run)
            else:
                with tf.device(self._home):
                    run.whole.run(ops)
        with tf.device(self._home):
            return [run.whole.read(value, WHOLE) for value in self.outputs]


def _is_divided(value: Value) -> bool:
    return value.fact.kind in ("rows", "part", "empty")


def _whole_lists(ops: Sequence[Op], outputs: Sequence[Value]) -> set[str]:
    """Returns the traced operations of lists that towers hold and that are needed whole."""
    lists = [value for op in ops for value, need in reads(op) if need == WHOLE and _is_list(value)]
    lists += [value for value in outputs if _is_list(value)]
    waiting = [value for value in lists if value.op.each is not None]
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            for op in ops:
                if value in op.outputs or value in op.inputs:
                    waiting += [v for v in (*op.inputs, *op.outputs) if _is_list(v)]
    touched = (op for op in ops if any(v in seen for v in (*op.inputs, *op.outputs)))
    return {op.source.name for op in touched}


def _is_list(value: Value) -> bool:
    return value.dtype == tf.variant


def _phases(ops: Sequence[Op]) -> Phases:
    """Returns the operations by phase, each in the earliest that it can run in.

    Operations that read or change one state keep their order.
    """
    phase_of: dict[Op, int] = {}
    last: dict[Any, tuple[int, int]] = defaultdict(lambda: (-1, -1))  # latest change, latest use
    phases: Phases = defaultdict(list)
    for op in ops:
        if op.each is not None and op.each.facts[0] == SIZE and not op.each.needs:
            continue
        in_towers = op.each is not None
        earliest = 0 if in_towers else -1
        for value, need in reads(op):
            made = phase_of.get(value.op, -1)
            if made % 2 == 0 and (not in_towers or need != OWN and value.fact not in (ONCE, SIZE)):
                made += 1  # towers meet
            earliest = max(earliest, made)
        states = [value for value in op.inputs if value.dtype == tf.resource]
        changes = has_effects(op)
        keys: list[Value | None] = [*states]
        if changes and not states:
            keys = [None]  # what prints, checks or calls Python keeps its order, too
        for state in keys:
            earliest = max(earliest, last[state][changes])
        phase = earliest + (earliest % 2 == in_towers)
        for state in keys:
            change, use = last[state]
            last[state] = (phase if changes else change), max(use, phase)
        phase_of[op] = phase
        phases[phase].append(op)
    return phases


class _Run:
    """Holds the values of one call: whole values, and each tower's values."""

    def __init__(
        self, given: dict[Value, Any], batch: Value | None, devices: Sequence[str], home: str,
        adds_on_devices: bool, takes_first: bool,
    ) -> None:  # fmt: skip
        """batch: one of the values given, which has the rows of the batch."""
        self.devices, self.home, self._adds_on_devices = devices, home, adds_on_devices
        self._takes_first = takes_first
        num_towers = len(devices)
        total = tf.shape(given[batch])[0] if batch is not None else tf.constant(1)
        tower = tf.range(num_towers)
        counts = total // num_towers + tf.cast(tower < total % num_towers, tf.int32)
        starts = tf.minimum(tf.cumsum(counts, exclusive=True), total - 1)
        # A tower without rows computes on the last row of the batch, because some kernels fail
        # without one. `_real` drops what it computes.
        self._has_rows = tf.unstack(counts > 0, num_towers)
        self.places = [
            Place(tf.maximum(count, 1), start, total)
            for count, start in zip(tf.unstack(counts, num_towers), tf.unstack(starts, num_towers))
        ]
        self.whole = Context(Place(total, tf.constant(0), total), self._meet)
        self.whole.values.update(given)
        self._given, self._total = given, total
        self.towers: list[dict[Value, Any]] = [{} for _ in self.places]
        self._met: dict[Value, Any] = {}
        self._shards: dict[tuple[Value, int], list[Any]] = {}

    def _meet(self, value: Value, need: Need) -> Any:
        """Returns what the towers have as one value, on the parameter device."""
        if need == OWN or value.fact == ONCE:  # an open size, or a value that towers have alike
            return self._given[value] if value in self._given else self.towers[0][value]
        if value in self._given:
            return self._given[value]
        if value not in self._met:
            is_split = value.fact != EACH
            parts = [self._real(t, value) for t in range(len(self.towers)) if is_split]
            with tf.device(self.home):
                if value.fact == EACH:
                    self._met[value] = self._average(value)
                elif value.fact == PART:
                    tree = partial_sums(
                        [[part] for part in parts], self.devices,
                        add_on_devices=self._adds_on_devices, parameter_device=self.home,
                    )  # fmt: skip
                    self._met[value] = add_tree(tree)[0]
                else:
                    self._met[value] = tf.concat(parts, value.fact.axis)
        return self._met[value]

    def _average(self, value: Value) -> Any:
        """Returns the average of what the towers have, weighted by rows, or tower 0's."""
        first = self.towers[0][value]
        if self._takes_first or not value.dtype.is_floating:
            return first
        found = []
        for t, place in enumerate(self.places):
            own = self.towers[t][value]
            weight = tf.cast(place.count, own.dtype) / tf.cast(self._total, own.dtype)
            # Without rows, a tower has computed on the last row.
            found.append(tf.where(self._has_rows[t], own * weight, tf.zeros_like(own)))
        return tf.add_n(found)

    def _real(self, t: int, value: Value) -> Any:
        """Returns what a tower adds to a value: no rows, or zeros, if the tower has no rows."""
        own = self.towers[t][value]
        if t == 0:  # it has a row of every batch
            return own
        if value.fact == PART:
            return tf.cond(self._has_rows[t], lambda: own, lambda: tf.zeros_like(own))
        no_rows = [slice(None)] * value.fact.axis + [slice(0, 0)]
        return tf.cond(self._has_rows[t], lambda: own, lambda: own[tuple(no_rows)])

    def values_for(self, value: Value, need: Need) -> list[Any]:
        """Returns, for each tower, a value as a stage reads it."""
        if need == OWN and value in self.towers[0]:
            return [tower[value] for tower in self.towers]
        if need in (OWN, WHOLE) and value.fact == ONCE or need == WHOLE:
            return [self.whole.read(value, WHOLE)] * len(self.towers)
        axis = value.fact.axis if need == OWN else need.axis
        if (value, axis) not in self._shards:
            with tf.device(self.home):
                self._shards[value, axis] = self._cut(self.whole.read(value, WHOLE), axis)
        return self._shards[value, axis]

    def _cut(self, whole: tf.Tensor, axis: int) -> list[tf.Tensor]:
        """Returns each tower's rows along an axis of a value of the batch."""
        shape = tf.shape(whole)
        each = shape[axis] // self._total
        at_axis = tf.one_hot(axis, tf.size(shape), True, False)
        with tf.control_dependencies([
            tf.debugging.assert_equal(each * self._total, shape[axis], "rows of the batch")
        ]):  # fmt: skip
            shards = []
            for place in self.places:
                begin = tf.where(at_axis, each * place.start, 0)
                shards.append(tf.slice(whole, begin, tf.where(at_axis, each * place.count, shape)))
        return shards


class _Stage:
    """Computes a tower's part between two meetings: one function, called on each device."""

    def __init__(self, ops: Sequence[Op], read_after: set[Value]) -> None:
        self._ops = ops
        own = {value for op in ops for value in op.outputs}
        found = (pair for op in ops for pair in reads(op) if pair[0] not in own)
        self._inputs = list(dict.fromkeys(found))
        self._outputs = [value for op in ops for value in op.outputs if value in read_after]
        self._traced: Callable | None = None

    def _function(self) -> Callable:
        """Returns the function of a tower, traced once."""
        if self._traced is None:

            def stage(place: Place, given: list[Any]) -> list[Any]:
                found = dict(zip(self._inputs, given, strict=True))
                context = Context(place, lambda value, need: found[value, need])
                context.run(self._ops)
                return [context.values[value] for value in self._outputs]

            scalar = tf.TensorSpec([], tf.int32)
            specs = [_spec(value, need) for value, need in self._inputs]
            with tf.init_scope(), tf.device(None):
                self._traced = tf.function(
                    stage, autograph=False, experimental_attributes=KEEP_WHOLE
                ).get_concrete_function(Place(scalar, scalar, scalar), specs)
        return self._traced

    def call(self, run: _Run) -> None:
        """Calls the function for each tower, on its device."""
        function = self._function()
        given = [run.values_for(value, need) for value, need in self._inputs]
        for t, (place, device) in enumerate(zip(run.places, run.devices, strict=True)):
            with tf.name_scope(f"tower_{t}"), tf.device(device):
                results = function(place, [values[t] for values in given])
            run.towers[t].update(zip(self._outputs, results, strict=True))


def _spec(value: Value, need: Need) -> tf.TensorSpec:
    """Returns the spec of what a stage reads: the number of rows is open."""
    shape = value.shape
    if need == OWN:
        shape = open_shape(value)
    elif need.kind == "rows" and shape.rank is not None:
        shape = tf.TensorShape([None if a == need.axis else n for a, n in enumerate(shape)])
    return tf.TensorSpec(shape, value.dtype)
