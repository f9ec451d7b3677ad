"""Traces a model's own step once, for batches of any size, and runs it divided among towers."""

import functools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from towers.divide.divided import Divided
from towers.divide.own_moments import Marked, marking
from towers.divide.ran_once import RanOnce
from towers.graph.repeatable import has_unsaved_noise
from towers.machine import devices as devices_lib
from towers.machine.devices import policy_of
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.machine.user_lines import line_of
from towers.step import checks, state as state_lib
from towers.step.checks import BatchInCode, checked_rows
from towers.step.structures import batch_specs, components, packed
from towers.workers.workers import join_workers


def is_switched_on() -> bool:
    """Returns whether steps are divided, which TOWERS_DIVIDE=1 in the environment asks for."""
    return os.environ.get("TOWERS_DIVIDE") == "1"


class DividedStep:
    """Runs a model's train_step, test_step or predict_step, Keras' or its own, on towers."""

    is_alone = True

    def __init__(
        self, model: keras.Model, name: str, devices: Sequence[str], num_towers: int,
        batch_norm: str | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            model: a Keras model.
            name: the name of the method of the model's class, data -> logs or predictions.
            devices: the names of the devices.
            num_towers: the number of towers.
            batch_norm: "average" or "tower0" for layers that normalize each tower's rows by
                themselves; by default, by the mean and variance of the whole batch.

        Raises:
            ValueError: this process is one of several workers.
        """
        self._cluster = join_workers()
        if self._cluster.num_workers > 1:
            raise ValueError("TOWERS_DIVIDE=1 works in one process: start one worker.")
        method = getattr(model.__class__, name)
        self._step = functools.partial(getattr(method, "python_function", method), model)
        self._policy = policy_of(devices)
        devices_lib.set_graph_optimizer(self._policy.optimize_graphs)
        self._devices = devices_lib.place_towers(num_towers, devices)
        self._parameter_device = state_lib.variables_device(model)
        self._num_towers, self._model, self._batch_norm = num_towers, model, batch_norm
        self.traces: dict[str, tuple[Any, Divided]] = {}

    def prepare(self, data: Any) -> tuple[Any, Divided]:
        """Traces the step once for each structure of data: a global batch, or its TensorSpecs.

        Returns (the traced function, the same divided).
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
        has_own = self._batch_norm in ("average", "tower0")
        marks: AbstractContextManager[dict[str, Marked]] = (
            marking(self._model) if has_own else nullcontext({})
        )
        with tf.device(self._parameter_device), custom_gradients_forgotten(), marks as markers:
            traced = tf.function(step, autograph=False).get_concrete_function(*flat)
        dense, row_splits = _row_inputs(specs)
        divided = Divided(
            traced, dense, self._devices, parameter_device=self._parameter_device,
            add_on_devices=self._policy.add_on_devices, row_splits=row_splits, markers=markers,
            takes_first=self._batch_norm == "tower0",
        )  # fmt: skip
        if divided.fixed_batch:
            raise BatchInCode(
                f"{line_of(divided.fixed_batch[0].source)} works for one batch size alone, which "
                "is written into the code. Take it from the data: tf.shape(x)[0]."
            )
        return traced, divided

    def __call__(self, data: Any) -> Any:
        """Runs the step on a global batch, in the caller's tf.function; returns what it returns.

        `data` is a structure of tensors [N, ...] of any kind or None. If N is known to differ, it
        raises ValueError.
        """
        traced, divided = self.prepare(data)
        is_usual = isinstance(data, tuple) and len(data) <= 3  # x, y, sample_weight
        with checked_rows(*(data if is_usual else [data])):
            outputs = divided(*components(data))
        return packed(traced.structured_outputs, iter(outputs))

    def run_undivided(self, data: Any) -> None:
        """Runs the step as on one device, to raise the error that cancelled the towers."""
        traced, _ = self.prepare(data)
        traced(*components(data))

    @property
    def variables(self) -> list[Any]:
        """Returns all variables that the step has used so far, each once."""
        found = [variable for traced, _ in self.traces.values() for variable in traced.variables]
        return list({id(variable): variable for variable in found}.values())

    def ran_once(self, batch_size: int) -> list[RanOnce]:
        """Returns what the step traced last runs once, although it has rows of the batch."""
        if not self.traces:
            return []
        _, divided = list(self.traces.values())[-1]
        return divided.runs_once.rows(batch_size)

    @property
    def has_unsaved_noise(self) -> bool:
        """Returns whether the step draws noise by tf.random, whose state cannot be saved."""
        graphs = [traced.graph for traced, _ in self.traces.values()]
        return any(has_unsaved_noise(graph.as_graph_def()) for graph in graphs)

    def check_agreement(self) -> None:
        """Raises ValueError if workers differ in versions, settings or the step's variables."""
        checks.check_agreement(self._cluster, self.variables, {"num_towers": self._num_towers})


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
