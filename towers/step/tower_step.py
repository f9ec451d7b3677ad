"""Provides TowerStep, which traces the update of step.py and keeps running metrics."""

import functools
from typing import Any

import keras
import tensorflow as tf

from towers.machine import hang
from towers.machine.devices import HOST
from towers.machine.keras_internals import all_layers
from towers.machine.user_lines import warn_user
from towers.step.averaging import Values
from towers.step.checks import check_arrays, check_placed, check_rows
from towers.step.errors import first_error, nonfinite_error, run_in_turn
from towers.step.metrics import track_losses
from towers.step.sharding import BatchValues, Placed
from towers.step.step import Step
from towers.step.structures import any_rows, as_tensor, map_tensors
from towers.workers.watch import watched


class TowerStep(Step):
    """Trains a Keras model with towers in a custom loop.

    ```python
    step = towers.TowerStep(model, "adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    logs = step(x, y)  # makes one update; returns this batch's loss and accuracy
    ```

    The parameters stay on the device on which they were created. The optimizer, and the variables
    that are trainable when the step is made, are fixed: to change them, make a new step.

    traces: the traced functions in the order of their traces; each takes any number of rows.
    """

    takes_elements = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.traces: list[Any] = []
        self._functions: dict[str, Any] = {}  # by method and the batch's structure
        self._flagged = [*all_layers(self.model), *self.model.variables]
        self._flags = [each.trainable for each in self._flagged]

    def __call__(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, tf.Tensor]:
        """Makes one synchronous update.

        Args:
            x: inputs of the global batch: a tensor or array [N, ...], or a structure of these.
            y: labels [N, ...]; for several outputs, a list, tuple or dict of these.
            sample_weight: weights [N] or [N, ...]; for several outputs, a list, tuple or dict of
                these.

        Returns:
            {"loss": scalar, metric name: scalar}, computed from this batch alone.
        """
        check_rows(x, y, sample_weight)
        self.reset_metrics()
        return self.train_batch(x, y, sample_weight)

    def train_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, placed: Placed = None
    ) -> dict[str, tf.Tensor]:
        """Makes one synchronous update.

        Args:
            x, y, sample_weight: the global batch, in the forms that a call of the step takes.
            placed: the shards on their devices, from `towers.prefetched`; None splits the batch.

        Returns:
            {"loss": scalar, metric name: scalar}: running means since `reset_metrics`.

        Raises:
            NonFiniteError: with nonfinite="stop", a loss or gradient is NaN or infinite. Nothing
                has changed.
            ValueError: x, y and sample_weight have different numbers of rows. Nothing has changed.
        """
        logs, finite = self._run("train", (x, y, sample_weight), placed)
        if self.nonfinite == "stop" and not finite.numpy().all():
            places = self.exchange.places(self.tower_devices)
            raise nonfinite_error(finite.numpy(), places, self.trainable_variables)
        return logs

    def test_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, placed: Placed = None
    ) -> dict[str, tf.Tensor]:
        """Computes loss and metrics in inference mode; arguments and result as in `train_batch`."""
        return self._run("test", (x, y, sample_weight), placed)

    def predict_batch(self, x: Any) -> Any:
        """Returns the model's outputs for one global batch, with rows in the order of the batch."""
        return self._run("predict", (x, None, None))

    def gradients(self, x: Any, y: Any = None, sample_weight: Any = None) -> tuple[Any, Values]:
        """Computes averaged gradients without an update.

        Changes no variable, no state and no seed. A loss scale is not applied.

        Returns:
            (loss, [gradient]), with the gradients in the order of `trainable_variables`.
        """
        return self._run("gradients", (x, y, sample_weight))

    def reset_metrics(self) -> None:
        """Restarts the running means of the loss and the metrics."""
        self.metrics.reset()
        if self.noise is not None:
            self.noise.reset_state()

    @property
    def metrics_variables(self) -> list[keras.Variable]:
        """The running sums of the loss and the metrics, and the `unlisted_variables`."""
        noise = self.noise.variables if self.noise is not None else []
        found = [*self.metrics.variables, *self.unlisted_variables, *noise]
        return list({id(v): v for v in found}.values())

    def build_metrics(self, name: str, x: Any, y: Any, sample_weight: Any = None) -> None:
        """Makes `metrics_variables`, which depend on the tower's outputs, as the first batch does.

        Takes the arguments of `trace_tower`.
        """
        self.metrics.build(y, self.trace_tower(name, x, y, sample_weight), x, sample_weight)

    def graph_of_update(self, *specs: Any) -> tf.Graph:
        """Returns the graph of an update of a batch of these specs, as --plan reads it."""
        update = tf.function(lambda *batch: self.update(self.compute(batch)), autograph=False)
        return update.get_concrete_function(*specs).graph

    def _run(self, name: str, batch: BatchValues, placed: Placed = None) -> Any:
        """Returns the result of the method `_NAME`, computed by its graph.

        The graph is traced once for batches of one structure, whatever their number of rows.
        Updates that are measured have their own trace: a condition would slow down each step.
        The specs of `placed` follow from the batch's: comparing them would cost more than the step.
        """
        check_placed(placed, batch[0], self.num_towers, self.local_towers)
        check_arrays(*batch)
        with tf.device(HOST):  # otherwise the whole batch would go to the first GPU
            tensors = map_tensors(as_tensor, batch)
        check_rows(*tensors)
        if next(v for v in tf.nest.flatten(tensors) if v is not None).shape[0] == 0:
            raise ValueError("the global batch has no examples.")
        tower = "train" if name == "gradients" else name
        specs = map_tensors(any_rows, tensors)  # an uneven last batch needs no other trace
        # tf.random would begin again in a second trace, so a model that uses it has one.
        is_measured = name == "train" and self.noise is not None and (
            self.has_unsaved_noise or self.noise.is_due(self.optimizer)
        )
        flags = [each.trainable for each in self._flagged]  # 0.2 ms for ResNet50
        if tower == "train" and flags != self._flags:
            self._flags = flags
            warn_user(
                "`trainable` has changed since the step was made, without effect; make a new step, "
                "or compile a parallel model again.",
            )
        key, phase = f"{name} {is_measured} {specs} {placed is None}", f"a {name} step"
        if key not in self._functions:
            with hang.tracing(f"the trace of {phase}"):
                if not self.traces:
                    self.check_agreement()
                self.tower.trace(tower, specs)
                if name in ("train", "test"):
                    self.build_metrics(name, *specs)
                method = getattr(self, f"_{name}")
                if name == "train":
                    method = functools.partial(method, is_measured)
                function = tf.function(method, autograph=False)
                traced = function.get_concrete_function(specs, map_tensors(any_rows, placed))
            self._functions[key] = traced
            self.traces.append(traced)
        with watched(self.cluster, phase), first_error(lambda: run_in_turn(self, tower, *tensors)):
            return self._functions[key](tensors, placed)

    # The traced methods.

    def run_in_graph(self, name: str, batch: BatchValues) -> Any:
        """Runs the method `_NAME`, and returns its logs or outputs, within the caller's graph."""
        if name == "train":
            return self._train(False, batch, None)[0]
        return getattr(self, f"_{name}")(batch, None)

    def _train(
        self, is_measured: bool, batch: BatchValues, placed: Placed
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor | None]:
        """Makes one update; returns (logs, `Computed.finite`)."""
        x, y, sample_weight = batch = self.whole(batch)
        computed = self.compute(
            batch, placed, with_predictions=self.metrics.need_predictions, is_measured=is_measured
        )

        def updated() -> dict[str, tf.Tensor]:
            y_pred = computed.predictions
            track_losses(self.metrics.model, x, y, y_pred, sample_weight, training=True)
            return self.metrics.update(self.update(computed), x, y, y_pred, sample_weight)

        with tf.device(self.parameter_device):
            if computed.finite is None:
                logs = updated()
            else:
                logs = tf.cond(tf.reduce_all(computed.finite), updated, self.metrics.result)
            if self.noise is not None:
                logs["noise_scale"] = self.noise.result()
            return logs, computed.finite

    def _test(self, batch: BatchValues, placed: Placed) -> dict[str, tf.Tensor]:
        x, y, sample_weight = batch = self.whole(batch)
        loss, y_pred = self.infer("test", batch, placed)
        with tf.device(self.parameter_device):
            track_losses(self.metrics.model, x, y, y_pred, sample_weight, training=False)
        return self.metrics.update(loss, x, y, y_pred, sample_weight)

    def _predict(self, batch: BatchValues, placed: Placed) -> Any:
        return self.infer("predict", self.whole(batch), placed)[1]

    def _gradients(self, batch: BatchValues, placed: Placed) -> tuple[tf.Tensor, Values]:
        del placed
        return self.gradients_of(self.whole(batch))
