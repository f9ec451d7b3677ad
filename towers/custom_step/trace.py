"""Traces a custom step once, for one tower: records its graph and its collectives.

    step(shard)  ->  graph    fed:   the shard, its share, reads of variables, collectives' results
                              kept:  collectives' inputs, gradients, assigned values, logs
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from towers.custom_step.patches import Patches
from towers.custom_step.step_collectives import StepCollectives
from towers.custom_step.variables import VariableScope
from towers.graph.cut import Segment, TowerCollective, cut
from towers.graph.repeatable import warn_of_unordered_sums
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.machine.user_lines import line_of
from towers.step.checks import check_no_fixed_batch
from towers.step.gathering import synchronized, synchronized_layers, warn_of_averages
from towers.step.raw_variables import check_closed, raw_variables_in, reads_none
from towers.step.state import statistics as statistics_of
from towers.step.structures import components

_MOST_TRACES = 4  # each may build one more level of nested layers
_READS_TABLES = ("LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2")


@dataclass
class Trace:
    """Holds one traced step.

    arguments: symbolic tensors: the shard's, its share n / N, and the index of its first row.
    assigned: (variable, value) pairs at the end. logs: the step's result for the global batch.
    function: the concrete function, which is cut into levels and never called.
    """

    arguments: list[tf.Tensor]
    collectives: StepCollectives
    scope: VariableScope
    assigned: list[tuple[keras.Variable, tf.Tensor]]
    logs: Any
    function: Any = None

    @functools.cached_property
    def towers(self) -> dict[int, Segment]:
        """Returns the segments that each tower computes, by level."""
        inputs = [v for collective in self.collectives.events for v in collective.inputs]
        return cut(self.function, self.collectives.dependence, inputs)

    @functools.cached_property
    def central_segments(self) -> dict[int, Segment]:
        """Returns the segments that the parameter device computes, by level."""
        updates = self.collectives.updates
        assigned = [*self.assigned, *(pair for update in updates for pair in update.assigned)]
        wanted = [[u.gradients for u in updates], [v for _, v in assigned], self.logs]
        flat = tf.nest.flatten(wanted, expand_composites=True)
        symbolic = [v for v in flat if tf.is_symbolic_tensor(v)]
        return cut(self.function, self.collectives.dependence, symbolic, with_effects=False)

    @property
    def num_levels(self) -> int:
        """Returns the number of levels, including levels of only collectives and updates."""
        levels = [e.level for e in self.collectives.events]
        levels += [update.level for update in self.collectives.updates]
        return 1 + max([*levels, *self.towers, *self.central_segments], default=-1)

    def collectives_of(self, level: int) -> list[TowerCollective]:
        """Returns the collectives that end a level, all sums as one: an exchange takes time."""
        found = [each for each in self.collectives.events if each.level == level]
        sums = [each for each in found if each.how == "sum"]
        inputs = [v for each in sums for v in each.inputs]
        outputs = [v for each in sums for v in each.outputs]
        joined = [each._replace(inputs=inputs, outputs=outputs) for each in sums[:1]]
        return [*joined, *(each for each in found if each.how != "sum")]

    @property
    def captured(self) -> dict[str, tf.Tensor]:
        """Returns the captured values and lookup tables of the step, by their names inside."""
        return {
            inside.name: outside for outside, inside in self.function.graph.captures
            if inside.dtype != tf.resource or _is_read_table(inside)
        }


def trace_step(
    model: keras.Model, step: Callable[[Any], Any], specs: Any, *, parameter_device: str,
    batch_norm: str | None, is_alone: bool = False,
) -> Trace:
    """Traces a step, which maps data to logs or predictions, until it creates no more variables.

    It must not run under `tf.init_scope`, which stops gradient tapes. It raises ValueError if the
    step uses something that towers do not support. One tower that `is_alone` needs no warnings.

    specs: the TensorSpecs of a batch, with an open first dimension; None for absent data.
    parameter_device: the device for variables that the step creates.
    """
    for _ in range(_MOST_TRACES):
        trace = _trace_once(model, step, specs, parameter_device, batch_norm)
        if not trace.scope.is_unready:
            _check_no_foreign_resources(trace)
            check_no_fixed_batch(trace.function.graph, trace.collectives.dependence)
            warn_of_unordered_sums(trace.function.graph)
            if not is_alone:
                trace.collectives.facts.rows.warn()
                if batch_norm is None:
                    ids = set(map(id, statistics_of(model, synchronized_layers(model, None))))
                    warn_of_averages(v for v, _ in trace.assigned if id(v) in ids)
            return trace
        trace.scope.make_variables()
    raise ValueError(
        f"the step of model {model.name!r} makes new variables every time that it is called. Make "
        "layers and optimizers once, in __init__ or in compile."
    )


def _trace_once(
    model: keras.Model, step: Callable, specs: Any, parameter_device: str, batch_norm: str | None
) -> Trace:
    made: list[Trace] = []

    def body(leaves: list, share: tf.Tensor, begin: tf.Tensor) -> None:
        given = [leaf for leaf in leaves if leaf is not None]
        collectives = StepCollectives(given, share, begin)

        def of_batch(values: Any, what: str) -> Any:
            return tf.nest.map_structure(lambda v: collectives.of_batch(v, what), values)

        layers = synchronized_layers(model, batch_norm)
        scope = VariableScope(
            collectives, parameter_device, statistics_of(model), takes_first=batch_norm == "tower0"
        )
        with (
            scope, Patches(collectives, scope).applied(), raw_variables_in(scope),
            synchronized(layers, share > 0, collectives.sum),
        ):
            logs = step(tf.nest.pack_sequence_as(specs, leaves))
            if isinstance(logs, dict):
                logs = {k: of_batch(v, f"{k!r}, which the step returns,") for k, v in logs.items()}
            else:
                logs = of_batch(logs, "what the step returns")
            assigned = scope.take_all_assigned()
        made.append(Trace([*components(given), share, begin], collectives, scope, assigned, logs))

    with custom_gradients_forgotten(), tf.device(None):
        function = tf.function(body, autograph=False).get_concrete_function(
            tf.nest.flatten(specs), tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.int32)
        )
    made[-1].function = function  # TensorFlow traces twice if variables are created
    return made[-1]


def _check_no_foreign_resources(trace: Trace) -> None:
    """Raises ValueError for state outside of the step, such as a lookup table that is written."""
    reads = [trace.scope.reads, *(update.reads for update in trace.collectives.updates)]
    known = {tensor.name for each in reads for tensor, _ in each}
    check_closed(trace.function, known)
    for _, placeholder in trace.function.graph.captures:
        if placeholder.dtype not in (tf.resource, tf.variant) or _is_read_table(placeholder):
            continue
        for user in placeholder.consumers():
            if user.type.startswith("LookupTable"):
                raise ValueError(
                    f"{line_of(user)} writes to a lookup table, which all towers share. Fill the "
                    "table before training, or keep the values in a variable: add_weight."
                )
            if reads_none(user, known):
                raise ValueError(
                    f"{line_of(user)} uses {user.type}, which keeps its state outside of the step. "
                    "Take it out of the step, into a callback or the data pipeline: "
                    "dataset.map(layer) looks up a table."
                )


def _is_read_table(handle: tf.Tensor) -> bool:
    """Returns whether a resource of the trace is a lookup table that the step only reads."""
    users = handle.consumers()
    return handle.dtype == tf.resource and all(user.type in _READS_TABLES for user in users)
