"""Traces a step of a whole batch once, for batches of any size, and runs it divided."""

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from towers.divide.divided import Divided
from towers.divide.machines import Machine
from towers.divide.own_moments import Marked, marking
from towers.divide.ran_once import RanOnce
from towers.divide.repeatable import has_unsaved_noise, warn_of_unordered_sums
from towers.divide.unchanged import unchanged
from towers.machine import devices as devices_lib
from towers.machine.keras_internals import stored_value
from towers.machine.tensorflow_internals import custom_gradients_forgotten, traced_graph
from towers.machine.user_lines import line_of
from towers.step.checks import BatchInCode, checked_rows
from towers.step.raw_variables import RawVariable
from towers.step.sharding import Placed
from towers.step.structures import (
    SPLIT, Structure, as_tensor, batch_specs, components, map_tensors, packed,
    row_components,
)  # fmt: skip


def method_of(model: keras.Model, name: str) -> Callable[[Structure], Any]:
    """Returns a method of the model's class that takes a batch, such as "train_step"."""
    method = getattr(model.__class__, name)
    if hasattr(method, "python_function"):  # of a tf.function, which would be traced only once
        method = tf.autograph.to_graph(method.python_function)
    return functools.partial(method, model)


class DividedStep:
    """Runs a step of a whole batch on towers, such as Keras' train_step or a custom one.

    num_rows: the number of examples in the newest batch of `run`.
    """

    def __init__(
        self, step: Callable[[Structure], Structure], machine: Machine, *,
        model: keras.Model | None = None, gives_parts: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            step: a function of one global batch that returns logs or predictions.
            machine: where it runs.
            model: the model that is trained.
            gives_parts: whether `with_parts` will be called.
        """
        self._step, self.machine, self._gives_parts, self._model = step, machine, gives_parts, model
        devices_lib.set_graph_optimizer(machine.policy.optimize_graphs)
        self.traces: dict[str, tuple[tf.Graph, Divided]] = {}
        self._functions: dict[tuple, Callable] = {}  # by method and the structure of data
        self.num_rows: int | None = None

    def prepare(self, data: Structure) -> tuple[tf.Graph, Divided]:
        """Traces the step once for each structure of data: a global batch, or its TensorSpecs.

        Returns (the traced graph, the same divided).
        """
        specs = batch_specs(data)
        key = str(specs)
        if key not in self.traces:
            self.traces[key] = self._trace(specs)
        return self.traces[key]

    def _trace(self, specs: Structure) -> tuple[tf.Graph, Divided]:
        flat, stages = components(specs), self.machine.stages

        def step(*data: tf.Tensor) -> Structure:  # "data" as in Keras, in the names of messages
            with nullcontext() if stages is None else stages.scopes():
                return self._step(packed(specs, iter(data)))

        # Not under tf.init_scope, which stops gradient tapes.
        marks: AbstractContextManager[dict[str, Marked]] = nullcontext({})
        if self.machine.batch_norm != "synchronized" and self._model is not None:
            marks = marking(self._model)
        with tf.device(self.machine.home), custom_gradients_forgotten(), marks as markers:
            graph, made = traced_graph(step, flat)
            if not self._are_metrics(made):  # such as an optimizer that was not built before
                markers.clear()
                graph, _ = traced_graph(step, flat)
        warn_of_unordered_sums(graph)
        divided = Divided(
            graph, row_components(specs), self.machine, self._gives_parts, markers=markers
        )
        if divided.fixed_batch:
            raise BatchInCode(
                f"{line_of(divided.fixed_batch[0].source)} works for one batch size alone, which "
                "is written into the code. Take it from the data: tf.shape(x)[0]."
            )
        return graph, divided

    def _are_metrics(self, variables: Sequence[tf.Variable]) -> bool:
        """Returns whether all variables are of the model's metrics, which change no later trace."""
        metrics = self._model.metrics_variables if self._model is not None else []
        return {id(v) for v in variables} <= {id(stored_value(v)) for v in metrics}

    def __call__(self, data: Structure, placed: Placed = None) -> Any:
        """Runs the step on a global batch, in the caller's tf.function; returns what it returns.

        data: a structure of tensors [N, ...] of any kind or None.
        placed: the shards of this worker's towers, on their devices; None: the step cuts them.

        Raises ValueError if parts of the batch are known to differ in N.
        """
        graph, divided = self.prepare(data)
        outputs = self._run(divided, data, placed)
        return packed(graph.structured_outputs, iter(outputs))

    def run(
        self, data: Structure, placed: Placed, method: Callable[..., object] | None = None
    ) -> Any:
        """Runs the step outside of a graph; traces it once for each structure of data.

        method: runs the step in a graph. Default: the call of this object.
        """
        specs = batch_specs(data)
        key = method, str(specs)
        if key not in self._functions:
            function = tf.function(method or self.__call__, autograph=False)
            traced = function.get_concrete_function(specs, batch_specs(placed))
            self._functions[key] = traced
        with tf.device(devices_lib.HOST):
            tensors = map_tensors(as_tensor, data)
        self.num_rows = next(v for v in tf.nest.flatten(tensors) if v is not None).shape[0]
        return self._functions[key](tensors, placed)

    def with_parts(self, data: Structure, placed: Placed = None) -> tuple[Any, Any, tf.Tensor]:
        """Runs the step like a call; also returns what each of this worker's towers adds.

        Returns (what the step returns, the same structure of `Parts` or None, [T] numbers of rows).
        """
        graph, divided = self.prepare(data)
        outputs, parts, counts = self._run(divided.with_parts, data, placed)
        structure = graph.structured_outputs
        return packed(structure, iter(outputs)), packed(structure, iter(parts)), counts

    def _run(self, run: Callable[..., Any], data: Structure, placed: Placed) -> Any:
        """Runs a method of `Divided` on a batch."""
        parts: Sequence[Structure] = [data]
        if isinstance(data, tuple) and len(data) <= 3:  # x, y, sample_weight
            parts = data
        with checked_rows(*parts):
            with tf.name_scope(SPLIT), tf.device(devices_lib.HOST):
                data = self.machine.exchange.agreed_batch(data)
            shards = None if placed is None else list(map(components, placed))
            return run(*components(data), placed=shards)

    def run_undivided(self, data: Structure) -> Any:
        """Runs the step on one device; returns what it returns, and changes no variable.

        Returns None if the worker has only its own rows.
        """
        if self.machine.exchange.has_own_rows:
            return None
        with unchanged(self.assigned(data)), tf.device(self.machine.home):
            return tf.function(self._step, autograph=False)(data)

    @property
    def variables(self) -> list[tf.Variable]:
        """Returns all variables that the step has used so far, each once."""
        found = [v for _, divided in self.traces.values() for v in divided.variables.values()]
        return list({id(variable): variable for variable in found}.values())

    def unlisted(self, listed: Sequence[keras.Variable]) -> list[RawVariable]:
        """Returns the variables of `variables` that are none of those listed."""
        known = {id(stored_value(variable)) for variable in listed}
        return [RawVariable(v) for v in self.variables if id(v) not in known]

    def assigned(self, data: Structure, apart: Collection[tf.Operation] = ()) -> list[tf.Variable]:
        """Returns the variables that operations of the step assign.

        data: a global batch, or its TensorSpecs. apart: operations that do not count.
        """
        return self.prepare(data)[1].assigned(apart)

    def ran_once(self, batch_size: int) -> list[RanOnce]:
        """Returns what the step traced last runs once, although it has rows of the batch."""
        if not self.traces:
            return []
        _, divided = list(self.traces.values())[-1]
        return divided.runs_once.rows(batch_size)

    @property
    def has_unsaved_noise(self) -> bool:
        """Returns whether the step draws noise by tf.random, whose state cannot be saved."""
        return any(has_unsaved_noise(graph) for graph, _ in self.traces.values())

    def check_agreement(self) -> None:
        """Raises ValueError if workers differ in versions, settings or the step's variables."""
        exchange, stages = self.machine.exchange, self.machine.stages
        settings = {
            "num_towers": exchange.num_towers, "batch_norm": self.machine.batch_norm,
            "stages": stages.names if stages else None,
        }  # fmt: skip
        exchange.check_agreement(list(map(RawVariable, self.variables)), settings)
