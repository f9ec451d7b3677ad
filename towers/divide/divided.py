"""Runs one traced step, divided among towers.

the trace of the whole batch  -->  analysis: in towers, or once?
                              -->  phases: stages of the towers, and meetings between them
a global batch                -->  each phase in its turn
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import tensorflow as tf

from towers.divide.analysis import Analysis
from towers.divide.context import reads, sources
from towers.divide.copies import NoCopies
from towers.divide.facts import SIZE, WHOLE, Op, Value
from towers.divide.flat import (
    flatten, has_effects, inputs_of, live, merged, new_op, outputs_of,
)  # fmt: skip
from towers.divide.lists import whole_lists
from towers.divide.machines import Machine
from towers.divide.meetings import Meeting, divided_for_xla
from towers.divide.mirrored import MirroredMeeting, copied_variables, mirrored_meetings
from towers.divide.own_moments import Marked
from towers.divide.parts import Parts, leaves, parts_of
from towers.divide.phases import Phases, phases_of
from towers.divide.pipeline import Pipeline, levels_of, stages_of
from towers.divide.probes import SHORT, ShortRefused
from towers.divide.products import multiply_sums
from towers.divide.ran_once import RunsOnce
from towers.divide.run import Run
from towers.divide.stages import Stage
from towers.step.structures import RowComponents

_END = -2  # stands for the phase in which the results are read


class Divided:
    """A traced function of the whole batch that runs in towers and computes the same.

    variables: the variables that it uses, by the values of their handles, in the trace's order.
    """

    def __init__(
        self, graph: tf.Graph, batch: RowComponents, machine: Machine,
        gives_parts: bool = False, markers: Mapping[str, Marked] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            graph: the FuncGraph of a function, traced with an open number of rows.
            batch: which of its inputs tell the number of rows of the batch.
            machine: where it runs.
            gives_parts: whether `with_parts` will be called.
            markers: the markers of statistics that each tower has for itself, by name.
        """
        self._graph, self._batch = graph, batch
        self._machine, self._markers = machine, markers
        self._analyse()
        handles = graph.external_captures
        by_handle = {id(variable.handle): variable for variable in graph.variables}
        captured = zip(self._inputs[len(self._inputs) - len(handles) :], handles, strict=True)
        self.variables: dict[Value, tf.Variable] = {
            value: by_handle[id(handle)] for value, handle in captured if id(handle) in by_handle
        }
        self._results = list(map(_before_identity, self.outputs))
        phases = phases_of(self.ops)
        read_in = self._phases_that_read(phases, gives_parts)
        meet = self._meetings([ops for phase, ops in phases.items() if phase % 2])
        stages = machine.stages
        levels = {} if stages is None else levels_of(self.ops, stages.num_stages)
        self._phases: list[Stage | Pipeline | Meeting | MirroredMeeting] = []
        for phase, ops in sorted(phases.items()):
            # A stage returns the values that later phases read; the other values stay inside.
            read_after = {value for value in outputs_of(ops) if read_in[value] - {phase}}
            if phase % 2:
                self._phases += meet(ops, read_after)
            elif stages is None:
                self._phases += stages_of(ops, read_after, machine.only_loops)
            else:
                self._phases.append(Pipeline(ops, read_after, levels, stages))

    def _phases_that_read(self, phases: Phases, gives_parts: bool) -> dict[Value, set[int]]:
        """Returns the phases in which each value is read; the results are read at the end."""
        read_in: dict[Value, set[int]] = defaultdict(set)
        for phase, ops in phases.items():
            for op in ops:
                for value, _ in reads(op):
                    read_in[value].add(phase)
        read_at_end = list(self._results)
        for value in self._results if gives_parts else ():
            read_at_end += leaves(value)
        for value in read_at_end:
            for source in sources(value):
                read_in[source].add(_END)
        return read_in

    def _meetings(
        self, meetings: Sequence[Sequence[Op]]
    ) -> Callable[..., list[Meeting] | list[MirroredMeeting]]:
        """Returns what makes meetings: on several devices, if they have copies of variables."""
        copies, self._are_lost = self._machine.copies, False
        if isinstance(copies, NoCopies):
            return lambda ops, read_after: [Meeting.of(ops, read_after)]
        # XLA compiles an update for one device, so all variables of the program are copied or none.
        programs = {op for ops in meetings for op in divided_for_xla(ops)[1]}
        copied = copied_variables(copies, meetings, programs, self.variables)
        for variable in copied.values():
            copies.of(variable)
        # Other assignments change the first device's variable alone, and make its copies stale.
        self._are_lost = any(
            copies.may_copy(variable) and value not in copied
            for value, variable in self.variables.items()
            if any(value in op.inputs and has_effects(op) for ops in meetings for op in ops)
        )
        return functools.partial(mirrored_meetings, copies, copied, self._machine.exchange.is_alone)

    def _analyse(self) -> None:
        """Decides what runs in towers. Lists that turn out to be needed whole then run once."""
        forced, lengths = set[str](), list(SHORT)
        while True:
            self._inputs = [
                new_op("Placeholder", tensor.op, [], [tensor]).outputs[0]
                for tensor in self._graph.inputs
            ]
            arguments = {id(t): v for t, v in zip(self._graph.inputs, self._inputs, strict=True)}
            ops, self.outputs = merged(*flatten(self._graph, arguments))
            analysis = Analysis(forced, self._markers, lengths[0])
            analysis.feed(self._inputs, self._batch)
            try:
                self.ops = _read(analysis.place(live(ops, self.outputs)), self.outputs)
            except ShortRefused:
                del lengths[0]
                continue
            # The towers' lists cannot be joined to a whole one. Operations on such a list run once.
            # This changes what other operations read, so decide again.
            needed = whole_lists(self.ops, self.outputs)
            if not needed:
                multiply_sums(self.ops)
                entries = {self._inputs[i] for i in self._batch.of_entries}
                self.runs_once = RunsOnce(self.ops, analysis.probes, entries)
                once = (op for op in self.ops if op.in_towers is None)
                self.fixed_batch = list(filter(analysis.probes.has_fixed_batch, once))
                return
            forced |= needed

    def __call__(
        self, *arguments: tf.Tensor, placed: Sequence[Sequence[tf.Tensor]] | None = None
    ) -> list[tf.Tensor]:
        """Runs the step within the caller's tf.function; returns the function's flat outputs.

        placed: for each of this worker's towers, its rows of all arguments, on its device; None:
            the step splits them.
        """
        return self._whole_outputs(self._computed(arguments, placed))

    def with_parts(
        self, *arguments: tf.Tensor, placed: Sequence[Sequence[tf.Tensor]] | None = None
    ) -> tuple[list[tf.Tensor], list[Parts | None], tf.Tensor]:
        """Runs the step; also returns what each of this worker's towers adds to the outputs.

        Returns (flat outputs, their `parts_of`, [T] numbers of rows).
        """
        run = self._computed(arguments, placed)
        local = self._machine.exchange.local_towers
        counts = tf.unstack(run.counts, self._machine.exchange.num_towers)
        shares = [tf.cast(counts[t], tf.float64) / tf.cast(run.total, tf.float64) for t in local]
        whole, copy = functools.partial(run.whole.read, need=WHOLE), run.whole.copy
        parts = [parts_of(value, run.real_parts, whole, copy, shares) for value in self._results]
        return self._whole_outputs(run), parts, run.counts

    def assigned(self, apart: Collection[tf.Operation] = ()) -> list[tf.Variable]:
        """Returns the variables that operations change; apart: operations that do not count."""
        left_out = set(map(id, apart))
        changing = (op for op in self.ops if has_effects(op) and id(op.source) not in left_out)
        changed = set(inputs_of(changing))
        return [variable for value, variable in self.variables.items() if value in changed]

    def _computed(
        self, arguments: Sequence[tf.Tensor], placed: Sequence[Sequence[tf.Tensor]] | None
    ) -> Run:
        """Runs all phases."""
        captured = self._graph.external_captures
        given = dict(zip(self._inputs, [*arguments, *captured], strict=True))
        dense = self._batch.dense
        batch = [self._inputs[i] for i in dense]
        shards = None if placed is None else [[own[i] for i in dense] for own in placed]
        with tf.device(self._machine.home):
            run = Run(self._machine, given, batch, self._batch.num_rows(arguments), shards)
        # Code between two steps may have assigned to the parameters.
        self._machine.copies.refresh_if_stale()
        for phase in self._phases:
            phase.call(run)
        if self._are_lost:  # other values have been assigned to the first device's variables
            self._machine.copies.mark_stale()
        return run

    def _whole_outputs(self, run: Run) -> list[tf.Tensor]:
        run.add_up(self._results)
        with tf.device(self._machine.home):
            return [run.whole.read(value, WHOLE) for value in self._results]


def _read(ops: Sequence[Op], outputs: Sequence[Value]) -> list[Op]:
    """Leaves out operations whose results no other operation reads in the end."""
    wanted = {source for value in outputs for source in sources(value)}
    kept = []
    for op in reversed(ops):
        is_size = op.in_towers is not None and op.in_towers.facts[0] == SIZE
        if has_effects(op) or is_size or not wanted.isdisjoint(op.outputs):
            kept.append(op)
            wanted.update(value for value, _ in reads(op))
    return kept[::-1]


def _before_identity(value: Value) -> Value:
    """Returns the value of which a result of a function is a copy, so that towers meet once."""
    if value.op.type == "Identity":
        return _before_identity(value.op.inputs[0])
    return value
