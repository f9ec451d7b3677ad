"""Keeps running means of the loss and of any Keras metrics over global batches."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.machine import loss_internals
from towers.machine.loss_internals import loss_tracker
from towers.machine.tensorflow_internals import SCRATCH_GRAPH
from towers.step.sharding import batch_size
from towers.step.structures import map_tensors, one_row


class BatchMetrics:
    """Updates the metrics that a model was compiled with; callbacks find them in the model.

    Many metrics cannot be averaged over shards, such as AUC or top-k over masked steps. They
    therefore see the predictions of the whole global batch, as on one device.

    names: the keys of the dict that `update` returns, in order; known after `build`.
    need_predictions: whether anything beside the loss is computed; known after `build`.
    """

    def __init__(self, model: keras.Model, device: str, *, adds_loss: bool = True) -> None:
        """`model` is compiled; its metrics' variables are on `device`.

        adds_loss: whether `update` returns the loss even if a custom `compute_metrics` does not.
        """
        self.model, self._device, self._adds_loss = model, device, adds_loss
        self.names, self.need_predictions, self._is_built = ["loss"], True, False

    def update(
        self, loss: tf.Tensor, x: Any, y: Any, predictions: Any, sample_weight: Any = None
    ) -> dict[str, tf.Tensor]:
        """Adds one global batch; returns {"loss": ..., metric: ...} over all batches since `reset`.

        `predictions` are the model's outputs for `x`, with masks and logits attached. They may be
        None if `need_predictions` is false.
        """
        with tf.device(self._device):
            with tf.control_dependencies([loss]):  # count nothing before the batch is checked
                loss_tracker(self.model).update_state(loss, sample_weight=batch_size(x))
            logs = self.model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
            return {"loss": loss_tracker(self.model).result(), **logs} if self._adds_loss else logs

    def result(self) -> dict[str, tf.Tensor]:
        """Returns the values since `reset`; those only a custom `compute_metrics` knows are NaN."""
        with tf.device(self._device):
            logs = self.model.get_metrics_result()
            logs = {"loss": loss_tracker(self.model).result(), **logs}
            return {name: logs.get(name, tf.constant(math.nan)) for name in self.names}

    def build(self, y: Any, predictions: Any, x: Any = None, sample_weight: Any = None) -> None:
        """Creates the metrics' variables for batches, or specs, like these; updates no metric.

        Call it before tracing: a tf.function that creates variables is traced twice. Raises
        ValueError if a metric does not fit the labels.
        """
        if self._is_built:
            return
        model, row = self.model, one_row((x, y, predictions, sample_weight))
        tracks = tracks_outputs(model, predictions)
        with tf.device(self._device), SCRATCH_GRAPH("metrics").as_default():
            # As tensors of the graph: TensorFlow checks no type of a tensor from outside of it.
            row = map_tensors(tf.identity, row)
            if tracks:
                loss_internals.track_output_losses(model, *row[1:])
            logs = model.compute_metrics(*row[:3], sample_weight=row[3])
        self.names, self._is_built = list({"loss": None, **logs}), True
        self.need_predictions = tracks or (
            loss_internals.compiled_metrics(model) is not None or reads_inputs(model)
        )

    def reset(self) -> None:
        """Resets the loss and all metrics."""
        loss_tracker(self.model).reset_state()
        self.model.reset_metrics()

    @property
    def variables(self) -> list[keras.Variable]:
        """Returns the variables of the loss and the metrics, each once."""
        found = [*loss_tracker(self.model).variables, *self.model.metrics_variables]
        return list({id(v): v for v in found}.values())


def make_metrics(metrics: Any, output_names: Sequence[str] | None, device: str) -> BatchMetrics:
    """Returns the BatchMetrics of metrics, as `compile` takes them, that no model has."""
    holder = keras.Model(name="metrics")  # without layers
    if output_names:
        holder.output_names = list(output_names)
    with tf.device(device):
        holder.compile(metrics=metrics or None)
    return BatchMetrics(holder, device)


def track_losses(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> None:
    """Updates what a model tracks while it computes a loss; call it before the update."""
    if overrides(model, "compute_loss"):
        call_compute_loss(model, x, y, y_pred, sample_weight, training)
    elif tracks_outputs(model, y_pred):
        loss_internals.track_output_losses(model, y, y_pred, sample_weight)


def tracks_outputs(model: keras.Model, y_pred: Any) -> bool:
    """Whether Keras reports the value of each loss beside the total."""
    loss = loss_internals.compile_arguments(model)[0]
    if loss is None or overrides(model, "compute_loss"):
        return False
    return len([each for each in keras.tree.flatten(loss) if each is not None]) > 1 or (
        not keras.tree.is_nested(loss) and len(tf.nest.flatten(y_pred)) > 1
    )


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model's class overrides this method of `keras.Model`."""
    return getattr(model.__class__, name) is not getattr(keras.Model, name)


def reads_inputs(model: keras.Model) -> bool:
    """Whether the model's own methods get x of the global batch, to compute a loss or metrics."""
    return overrides(model, "compute_loss") or overrides(model, "compute_metrics")


def call_compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """Calls a custom `compute_loss`; older ones have no argument `training`."""
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    options = {"training": training} if takes_training else {}
    return model.compute_loss(x, y, y_pred, sample_weight, **options)
