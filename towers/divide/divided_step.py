"""Traces a step of a whole batch once, for batches of any size, and runs it divided."""

import functools
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from towers.divide.divided import Divided
from towers.divide.own_moments import Marked, marking
from towers.divide.ran_once import RanOnce
from towers.divide.stages import FullShards
from towers.divide.switch import check_divisible
from towers.divide.unchanged import unchanged
from towers.graph.repeatable import has_unsaved_noise
from towers.machine import devices as devices_lib
from towers.machine.devices import Policy
from towers.machine.keras_internals import stored_value
from towers.machine.tensorflow_internals import custom_gradients_forgotten, traced_graph
from towers.machine.user_lines import line_of
from towers.step import checks
from towers.step.checks import BatchInCode, checked_rows
from towers.step.raw_variables import RawVariable
from towers.step.structures import batch_specs, components, packed
from towers.workers.workers import Workers, join_workers


def method_of(model: keras.Model, name: str) -> Callable[[Any], Any]:
    """Returns a method of the model's class that takes a batch, such as "train_step"."""
    method = getattr(model.__class__, name)
    return functools.partial(getattr(method, "python_function", method), model)


class DividedStep:
    """Runs a step of a whole batch on towers, such as Keras' train_step or a custom one."""

    def __init__(
        self, step: Callable[[Any], Any], tower_devices: Sequence[str], *, parameter_device: str,
        policy: Policy, cluster: Workers | None = None, gives_parts: bool = False,
        model: keras.Model | None = None, batch_norm: str | None = None,
        full_batch: FullShards | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            step: a function of one global batch that returns logs or predictions.
            tower_devices: the device of each tower.
            parameter_device: the device of the variables, where whole values are.
            policy: how devices are used.
            cluster: the workers. Default: the workers that the environment names.
            gives_parts: whether `with_parts` will be called.
            model: the model that is trained.
            batch_norm: "average" or "tower0" for layers that normalize each tower's rows by
                themselves. Default: all layers take the mean and variance of the whole batch.
            full_batch: tells which towers' loops XLA compiles, given T numbers of rows; None: none.

        Raises:
            ValueError: this process is one of several workers.
        """
        self._cluster = join_workers() if cluster is None else cluster
        check_divisible(**{"several workers": self._cluster.num_workers > 1})
        self._step, self._policy, self._devices = step, policy, tower_devices
        self._parameter_device, self._gives_parts = parameter_device, gives_parts
        self._model = model
        self._marks_moments = batch_norm in ("average", "tower0")
        self._takes_first, self._full_batch = batch_norm == "tower0", full_batch
        devices_lib.set_graph_optimizer(policy.optimize_graphs)
        self.traces: dict[str, tuple[Any, Divided]] = {}

    def prepare(self, data: Any) -> tuple[Any, Divided]:
        """Traces the step once for each structure of data: a global batch, or its TensorSpecs.

        Returns (the traced graph, the same divided).
        """
        specs = batch_specs(data)
        key = str(specs)
        if key not in self.traces:
            self.traces[key] = self._trace(specs)
        return self.traces[key]

    def _trace(self, specs: Any) -> tuple[Any, Divided]:
        flat = components(specs)

        def step(*data: tf.Tensor) -> Any:  # "data" as in Keras, in the names of messages
            return self._step(packed(specs, iter(data)))

        # Not under tf.init_scope, which stops gradient tapes.
        marks: AbstractContextManager[dict[str, Marked]] = nullcontext({})
        if self._marks_moments and self._model is not None:
            marks = marking(self._model)
        with tf.device(self._parameter_device), custom_gradients_forgotten(), marks as markers:
            graph, made = traced_graph(step, flat)
            if not self._are_metrics(made):  # such as an optimizer that was not built before
                markers.clear()
                graph, _ = traced_graph(step, flat)
        dense, row_splits = _row_inputs(specs)
        divided = Divided(
            graph, dense, self._devices, parameter_device=self._parameter_device,
            add_on_devices=self._policy.add_on_devices, gives_parts=self._gives_parts,
            row_splits=row_splits, markers=markers, takes_first=self._takes_first,
            full_batch=self._full_batch,
        )  # fmt: skip
        if divided.fixed_batch:
            raise BatchInCode(
                f"{line_of(divided.fixed_batch[0].source)} works for one batch size alone, which "
                "is written into the code. Take it from the data: tf.shape(x)[0]."
            )
        return graph, divided

    def _are_metrics(self, variables: Sequence[Any]) -> bool:
        """Returns whether all variables are of the model's metrics, which change no later trace."""
        metrics = self._model.metrics_variables if self._model is not None else []
        return {id(v) for v in variables} <= {id(stored_value(v)) for v in metrics}

    def __call__(self, data: Any) -> Any:
        """Runs the step on a global batch, in the caller's tf.function; returns what it returns.

        `data` is a structure of tensors [N, ...] of any kind or None. If N is known to differ, it
        raises ValueError.
        """
        graph, divided = self.prepare(data)
        with _checked(data):
            outputs = divided(*components(data))
        return packed(graph.structured_outputs, iter(outputs))

    def with_parts(self, data: Any) -> tuple[Any, Any, tf.Tensor]:
        """Runs the step like a call; also returns what each tower adds to the results.

        Returns (what the step returns, the same structure of `Parts` or None, [T] numbers of rows).
        """
        graph, divided = self.prepare(data)
        with _checked(data):
            outputs, parts, counts = divided.with_parts(*components(data))
        structure = graph.structured_outputs
        return packed(structure, iter(outputs)), packed(structure, iter(parts)), counts

    def run_undivided(self, data: Any) -> None:
        """Runs the step on one device, to raise its first error; changes no variable."""
        with unchanged(self.assigned(data)), tf.device(self._parameter_device):
            tf.function(self._step, autograph=False)(data)

    @property
    def variables(self) -> list[Any]:
        """Returns all variables that the step has used so far, each once."""
        found = [variable for graph, _ in self.traces.values() for variable in graph.variables]
        return list({id(variable): variable for variable in found}.values())

    def unlisted(self, listed: Sequence[keras.Variable]) -> list[RawVariable]:
        """Returns the variables of `variables` that are none of those listed."""
        known = {id(stored_value(variable)) for variable in listed}
        return [RawVariable(v) for v in self.variables if id(v) not in known]

    def assigned(self, data: Any, apart: Collection[tf.Operation] = ()) -> list[tf.Variable]:
        """Returns the variables that operations of the step assign.

        data: a global batch, or its TensorSpecs. apart: operations that do not count.
        """
        graph, divided = self.prepare(data)
        changed = [graph.external_captures[i] for i in divided.changed_inputs(apart)]
        return [v for v in graph.variables if any(v.handle is handle for handle in changed)]

    def ran_once(self, batch_size: int) -> list[RanOnce]:
        """Returns what the step traced last runs once, although it has rows of the batch."""
        if not self.traces:
            return []
        _, divided = list(self.traces.values())[-1]
        return divided.runs_once.rows(batch_size)

    @property
    def has_unsaved_noise(self) -> bool:
        """Returns whether the step draws noise by tf.random, whose state cannot be saved."""
        graphs = [graph.as_graph_def() for graph, _ in self.traces.values()]
        return any(map(has_unsaved_noise, graphs))

    def check_agreement(self) -> None:
        """Raises ValueError if workers differ in versions, settings or the step's variables."""
        settings = {"num_towers": len(self._devices)}
        checks.check_agreement(self._cluster, self.variables, settings)


def _checked(data: Any) -> Any:
    """Returns a context in which a batch's parts must have equal numbers of rows."""
    is_usual = isinstance(data, tuple) and len(data) <= 3  # x, y, sample_weight
    return checked_rows(*(data if is_usual else [data]))


def _row_inputs(specs: Any) -> tuple[list[int], list[int]]:
    """Returns which of the flat tensors of a batch are dense, with the rows along axis 0.

    The second list has those that say where ragged rows begin and end.
    """
    dense, row_splits, place = [], [], 0
    for spec in tf.nest.flatten(specs):
        if spec is None:
            continue
        parts = tf.nest.flatten(spec, expand_composites=True)
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank:
            dense.append(place)
        if isinstance(spec, tf.RaggedTensorSpec):  # the values, then the splits of each axis
            row_splits.append(place + len(parts) - spec.ragged_rank)
        place += len(parts)
    return dense, row_splits
