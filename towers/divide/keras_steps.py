"""Runs Keras' own steps of a model, divided among towers, with what TowerStep adds to them.

    global batch -> Keras' own train_step, traced -> divided.py -> logs
                      loss, gradients -> watched_update.py -> optimizer, once

A custom compute_loss or compute_metrics of the model's class is traced with it.
"""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from towers.divide.divided_step import DividedStep, method_of
from towers.divide.machines import Machine
from towers.divide.parts import Gradient
from towers.divide.tower_results import measure_noise, towers_finite
from towers.divide.unchanged import restore, unchanged
from towers.divide.watched_update import WatchedUpdate
from towers.machine.loss_internals import loss_tracker
from towers.step.averaging import Values
from towers.step.errors import checked
from towers.step.metrics import BatchMetrics
from towers.step.noise_scale import NoiseMetric
from towers.step.sharding import Placed
from towers.step.structures import Structure


class KerasSteps:
    """Updates, evaluates and predicts in the caller's graph.

    divided: the step of a whole batch behind each method, by name.
    """

    def __init__(
        self, twin: keras.Model, parameters: Sequence[keras.Variable],
        machine_of: Callable[[str], Machine], *, nonfinite: str, noise: NoiseMetric | None,
        metrics: BatchMetrics,
    ) -> None:  # fmt: skip
        """
        twin: is compiled. parameters: its trainable variables. machine_of: tells where "train",
        "test" and "predict" run. nonfinite: an argument of `TowerStep`. noise: measures the noise
        scale. metrics: the metrics of the twin.
        """
        self._twin, self._parameters, self._machine = twin, parameters, machine_of("train")
        self._nonfinite, self._noise, self._metrics = nonfinite, noise, metrics
        self._updates: dict[tf.Graph, WatchedUpdate] = {}  # by the graph of a traced train_step
        steps = {
            "train": self._keras_train, "gradients": self._keras_gradients,
            "test": method_of(twin, "test_step"), "predict": method_of(twin, "predict_step"),
        }  # fmt: skip
        self.divided = {
            name: DividedStep(
                step, machine_of("train" if name == "gradients" else name), model=twin,
                gives_parts=name == "gradients" or name == "train" and noise is not None,
            )
            for name, step in steps.items()
        }  # fmt: skip

    def prepare(self, name: str, specs: Structure) -> None:
        """Traces the step behind a method for specs of a batch."""
        graph, _ = self.divided["gradients" if name == "diagnosis" else name].prepare(specs)
        if name in ("train", "test"):
            logs = graph.structured_outputs
            self._metrics.names = list({"loss": None, **(logs[0] if name == "train" else logs)})

    def train(
        self, batch: Structure, placed: Placed
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        """Makes one update; returns (logs, `WatchedUpdate.finite`)."""
        return self._train(batch, placed, False)

    def train_measured(
        self, batch: Structure, placed: Placed
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        """Makes one update like `train`, and measures the noise scale."""
        return self._train(batch, placed, True)

    def _train(
        self, batch: Structure, placed: Placed, is_measured: bool
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        step = self.divided["train"]
        update = self._updates[step.prepare(batch)[0]]
        changed = step.assigned(batch, update.operations) if update.finite is not None else []
        with tf.device(self._machine.home):
            loss_scale = tf.cast(self._twin.optimizer.scale_loss(tf.ones([])), tf.float32)
            before = [variable.read_value() for variable in changed]
        if self._noise is not None and is_measured:
            results, parts, sizes = step.with_parts(batch, placed)
            with tf.device(self._machine.home):
                divided = results[2], parts[2], sizes
                measure_noise(self._noise, self._machine.exchange, *divided, loss_scale)
        else:
            results = step(batch, placed)
        logs, _, _, finite = results
        with tf.device(self._machine.home):
            logs = self._with_loss(logs)
            if finite is not None:

                def undo() -> dict[str, tf.Tensor]:
                    """Takes back what the step has assigned outside of the update."""
                    restore(changed, before)
                    return {name: self._metrics.result().get(name, logs[name]) for name in logs}

                logs = tf.cond(tf.reduce_all(finite), lambda: logs, undo)
            if self._noise is not None:
                logs["noise_scale"] = self._noise.result()
        return logs, finite

    def test(self, batch: Structure, placed: Placed) -> dict[str, tf.Tensor]:
        logs = self.divided["test"](batch, placed)
        with tf.device(self._machine.home):
            return self._with_loss(logs)

    def predict(self, batch: Structure, placed: Placed) -> Structure:
        return self.divided["predict"](batch, placed)

    def gradients(self, batch: Structure, placed: Placed) -> tuple[tf.Tensor, Values]:
        del placed
        step = self.divided["gradients"]
        with tf.device(self._machine.home), unchanged(step.assigned(batch)):
            loss, gradients = step(batch)
            results: Values = []
            for gradient, variable in zip(gradients, self._parameters, strict=True):
                if isinstance(gradient, tuple):
                    gradient = tf.IndexedSlices(
                        *gradient, tf.constant(list(variable.shape), tf.int64)
                    )
                results.append(gradient)
        return loss, results

    def diagnosis(self, batch: Structure, placed: Placed) -> tf.Tensor:
        """Returns [T, 1 + V], `towers_finite` of what is checked; changes no variable."""
        del placed
        step = self.divided["gradients"]
        with tf.device(self._machine.home), unchanged(step.assigned(batch)):
            (loss, gradients), (loss_parts, parts), _ = step.with_parts(batch)
            if "gradients" not in checked(self._nonfinite, self._twin.optimizer):
                gradients, parts = [], []
            own = towers_finite(loss, gradients, loss_parts, parts, self._machine.devices)
            return tf.stack(self._machine.exchange.all_gather(own))

    def _with_loss(self, logs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Returns logs that begin with the loss, even if a custom `compute_metrics` lacks it."""
        return {"loss": loss_tracker(self._twin).result(), **logs}

    # The traced steps of a whole batch.

    def _keras_train(
        self, data: Structure
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor, list[Gradient], tf.Tensor | None]:
        """Makes one update; returns (logs, loss, gradients, `WatchedUpdate.finite`)."""
        update = WatchedUpdate(self._twin.optimizer, checked(self._nonfinite, self._twin.optimizer))
        with update.made():
            logs = method_of(self._twin, "train_step")(data)
        self._updates[tf.compat.v1.get_default_graph()] = update
        return logs, update.loss, update.gradients, update.finite

    def _keras_gradients(self, data: Structure) -> tuple[tf.Tensor, list[Gradient]]:
        """Returns (loss, gradients) of train_step; makes no update, but assigns states."""
        update = WatchedUpdate(self._twin.optimizer, ())
        with update.left_out():
            method_of(self._twin, "train_step")(data)
        return update.loss, update.gradients
