"""A step of the user's own, traced once for one tower: its graph, and where it meets other towers.

    step(shard)  ->  graph    fed:   the shard, its share, reads of variables, what collectives give
                              kept:  collectives' inputs, gradients, assigned values, logs
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from towers.graph.cut import captures, effects_of
from towers.graph.dependence import Dependence
from towers.graph.repeatable import warn_of_unordered_sums
from towers.graph.tower_collectives import TowerCollective
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.machine.user_lines import line_of
from towers.custom_step.patches import Patches
from towers.custom_step.step_collectives import StepCollectives, Update
from towers.custom_step.variables import VariableScope
from towers.graph.rows import Rows
from towers.step import structures
from towers.step.fixed_batch import check_no_fixed_batch
from towers.step.raw_variables import raw_variables_in
from towers.step.state import statistics as statistics_of
from towers.step.synchronized import synchronized, synchronized_layers, warn_of_averages

_MOST_TRACES = 4  # layers in layers are built one after another
_OF_VARIABLES = ("ReadVariableOp", "ResourceGather", "Assign", "ResourceScatter", "VariableShape")
_READS_TABLES = ("LookupTableFindV2", "LookupTableSizeV2", "LookupTableExportV2")
_OF_TABLES = ("LookupTable",)


@dataclass
class Trace:
    """One traced step.

    function: of (leaves, share, begin); it is cut up and never called.
    leaves: the shard's symbolic tensors. share, begin: see `StepCollectives`.
    captured: (outside, inside) of what the step takes from outside but variables.
    reads, seeds: see `VariableScope`. assigned: (variable, value) at the end.
    """

    function: Any
    dependence: Dependence
    rows: Rows
    leaves: list[tf.Tensor]
    share: tf.Tensor
    begin: tf.Tensor
    events: list[TowerCollective | Update]
    reads: list[tuple[tf.Tensor, keras.Variable]]
    seeds: set[str]
    assigned: list[tuple[keras.Variable, tf.Tensor]]
    logs: Any

    @property
    def collectives(self) -> list[TowerCollective]:
        """The collectives of the step, in order."""
        return [event for event in self.events if isinstance(event, TowerCollective)]

    @property
    def updates(self) -> list[Update]:
        """The calls of optimizers."""
        return [event for event in self.events if isinstance(event, Update)]

    @property
    def captured(self) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """(outside, inside) of the values that the step takes from outside, and of its tables."""
        return [
            (outside, inside) for outside, inside in captures(self.function)
            if inside.dtype != tf.resource or _is_read_table(inside)
        ]

    @property
    def effects(self) -> list[tf.Operation]:
        """Operations that must run although nobody reads them."""
        return effects_of(self.function)


def trace_step(
    model: keras.Model,
    step: Callable[[Any], Any],
    specs: Any,
    *,
    home: str,
    batch_norm: str | None,
    is_alone: bool = False,
) -> Trace:
    """Traces a step until it makes no more variables.

    Not under `tf.init_scope`, which stops gradient tapes.

    Args:
        model: whose step it is.
        step: data -> logs, or predictions.
        specs: of a batch, in the structure of `data`, with an open first dimension.
        home: the device for variables that the step makes.
        batch_norm: see `TowerStep`.
        is_alone: whether there is one tower, whose shard is the batch: nothing is warned of.

    Raises:
        ValueError: the step does what towers cannot follow.
    """
    for _ in range(_MOST_TRACES):
        trace, scope = _trace_once(model, step, specs, home, batch_norm)
        if not scope.is_unready:
            check_no_foreign_resources(trace.function, scope)
            check_no_fixed_batch(trace.function.graph, trace.dependence)
            warn_of_unordered_sums(trace.function.graph)
            if not is_alone:
                trace.rows.warn()
                if batch_norm is None:
                    averaged = statistics_of(model, synchronized_layers(model, batch_norm))
                    ids = set(map(id, averaged))
                    warn_of_averages(v for v, _ in trace.assigned if id(v) in ids)
            return trace
        scope.make_variables()
    raise ValueError(
        f"the step of model {model.name!r} makes new variables every time that it is called. Make "
        "layers and optimizers once, in __init__ or in compile."
    )


def _trace_once(
    model: keras.Model, step: Callable, specs: Any, home: str, batch_norm: str | None
) -> tuple[Trace, VariableScope]:
    made: list[tuple[Callable[[Any], Trace], VariableScope]] = []

    def body(leaves: list, share: tf.Tensor, begin: tf.Tensor) -> None:
        given = [leaf for leaf in leaves if leaf is not None]
        collectives = StepCollectives(given, share, begin)
        layers = synchronized_layers(model, batch_norm)
        statistics = statistics_of(model)
        averaged, first = ([], statistics) if batch_norm == "tower0" else (statistics, [])
        scope = VariableScope(collectives, home, averaged, first)
        with (
            collectives.current(), scope, Patches(collectives, scope).applied(),
            raw_variables_in(scope), synchronized(layers, collectives.is_real, collectives.sum),
        ):
            logs = _of_batch(collectives, step(tf.nest.pack_sequence_as(specs, leaves)))
            assigned = scope.take_all_assigned()
        all_but_function = functools.partial(
            Trace, dependence=collectives.dependence, rows=collectives.rows,
            leaves=structures.components(given),
            share=share, begin=begin, events=collectives.events, reads=scope.reads,
            seeds=scope.seeds, assigned=assigned, logs=logs,
        )
        made.append((all_but_function, scope))

    with custom_gradients_forgotten(), tf.device(None):
        function = tf.function(body, autograph=False).get_concrete_function(
            tf.nest.flatten(specs), tf.TensorSpec([], tf.float64), tf.TensorSpec([], tf.int32)
        )
    all_but_function, scope = made[-1]  # of two traces, where TensorFlow saw variables being made
    return all_but_function(function), scope


def _of_batch(collectives: StepCollectives, logs: Any) -> Any:
    """The step's logs for the global batch."""
    if isinstance(logs, dict):
        return {
            key: tf.nest.map_structure(
                lambda v, key=key: collectives.of_batch(v, f"{key!r}, which the step returns,"),
                value,
            )
            for key, value in logs.items()
        }
    return tf.nest.map_structure(
        lambda v: collectives.of_batch(v, "what the step returns"), logs
    )


def check_no_foreign_resources(function: Any, scope: VariableScope) -> None:
    """Raises ValueError for a tf.Variable, a table that is written, and whatever else has a state.

    Args:
        function: the traced step.
        scope: which knows the reads of Keras' variables.
    """
    known = scope.read_names
    for handle, placeholder in captures(function):
        if placeholder.dtype not in (tf.resource, tf.variant) or _is_read_table(placeholder):
            continue
        for user in placeholder.consumers():
            if not any(output.name in known for output in user.outputs):
                raise ValueError(f"{line_of(user)} {_what(user, handle, function)}")


def _is_read_table(handle: tf.Tensor) -> bool:
    """Whether a resource of the trace is a lookup table that the step only reads."""
    users = handle.consumers()
    return handle.dtype == tf.resource and all(user.type in _READS_TABLES for user in users)


def _what(user: tf.Operation, handle: Any, function: Any) -> str:
    if user.type.startswith(_OF_TABLES):
        return (
            "writes to a lookup table, which all towers share. Fill the table before training, or "
            "keep the values in a variable: add_weight."
        )
    names = [v.name for v in function.variables if v.handle is handle]
    if names or user.type.startswith(_OF_VARIABLES):
        name = f" {names[0]!r}" if names else ""
        return (
            f"uses tf.Variable{name}, which Keras does not track, so that towers cannot tell what "
            "it becomes. Create it with add_weight or keras.Variable, and draw noise from "
            "keras.random with a keras.random.SeedGenerator."
        )
    return (
        f"uses {user.type}, which keeps its state outside of the step. Take it out of the step, "
        "into a callback or the data pipeline: dataset.map(layer) looks up a table."
    )
