"""Running means of the loss and of any Keras metrics over the global batch."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.machine import loss_internals
from towers.machine.loss_internals import loss_tracker
from towers.step.sharding import batch_size
from towers.step.structures import one_row


class BatchMetrics:
    """The metrics that a model was compiled with, kept in the model: callbacks find them there.

    A metric over the whole global batch cannot in general be averaged from shards (AUC, top-k over
    masked steps): it sees the predictions of all towers at once, as on one device.

    names: of what `update` returns, in order; known once `build` was called.
    need_predictions: whether anything beside the loss is computed; known then, too.
    """

    def __init__(self, model: keras.Model, device: str) -> None:
        """Args: model: compiled. device: where its metrics' variables live."""
        self._model, self._device = model, device
        self.need_predictions, self._is_built = True, False
        self.names = ["loss"]

    def track_losses(
        self, x: Any, y: Any, predictions: Any, sample_weight: Any = None, training: bool = False
    ) -> None:
        """Updates what the model tracks while it computes its loss; arguments as for `update`."""
        with tf.device(self._device):
            track_losses(self._model, x, y, predictions, sample_weight, training)

    def update(
        self, loss: tf.Tensor, x: Any, y: Any, predictions: Any, sample_weight: Any = None
    ) -> dict[str, tf.Tensor]:
        """Adds one global batch; returns {"loss": ..., metric: ...} over all since `reset`.

        Args:
            loss: the global batch's loss, a scalar.
            x: its inputs.
            y: its labels.
            predictions: the model's outputs for it, with their marks; None where nothing needs
                them.
            sample_weight: of the batch, for metrics that ask for it.
        """
        with tf.device(self._device):
            logs = update_metrics(self._model, loss, x, y, predictions, sample_weight)
            return {"loss": loss_tracker(self._model).result(), **logs}

    def result(self) -> dict[str, tf.Tensor]:
        """The values over all batches since `reset`.

        The value of what only a custom `compute_metrics` knows is NaN.
        """
        with tf.device(self._device):
            logs = self._model.get_metrics_result()
            logs = {"loss": loss_tracker(self._model).result(), **logs}
            return {name: logs.get(name, tf.constant(math.nan)) for name in self.names}

    def build(self, y: Any, predictions: Any, x: Any = None, sample_weight: Any = None) -> None:
        """Makes the metrics' variables, which depend on the outputs' shapes.

        A tf.function in which variables are made is traced a second time: do this before.

        Args:
            y, predictions, x, sample_weight: what `update` will be given, or specs of it.

        Raises:
            ValueError: a metric does not fit the labels.
        """
        if self._is_built:
            return
        model, row = self._model, one_row((x, y, predictions, sample_weight))
        tracks = tracks_outputs(model, predictions)
        with tf.device(self._device):
            if tracks:
                loss_internals.track_output_losses(model, *row[1:])
            logs = model.compute_metrics(*row[:3], sample_weight=row[3])
            self.reset()
        self.names, self._is_built = list({"loss": None, **logs}), True
        self.need_predictions = tracks or (
            loss_internals.compiled_metrics(model) is not None
            or overrides(model, "compute_loss")
            or overrides(model, "compute_metrics")
        )

    def reset(self) -> None:
        """Forgets all batches."""
        loss_tracker(self._model).reset_state()
        self._model.reset_metrics()

    @property
    def variables(self) -> list[keras.Variable]:
        """The running sums, each once."""
        found = [*loss_tracker(self._model).variables, *self._model.metrics_variables]
        return list({id(v): v for v in found}.values())


class _MetricsHolder(keras.Model):
    """A model without layers: it only lends us Keras' handling of `compile(metrics=...)`."""


def make_metrics(metrics: Any, output_names: Sequence[str] | None, device: str) -> BatchMetrics:
    """Metrics that no model was compiled with.

    Args:
        metrics: as `keras.Model.compile` takes them.
        output_names: the names of the model's outputs, if it has any.
        device: where the metrics' variables live.
    """
    holder = _MetricsHolder()
    if output_names:
        holder.output_names = list(output_names)
    with tf.device(device):
        holder.compile(metrics=metrics or None)
    return BatchMetrics(holder, device)


def track_losses(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> None:
    """Feeds what a model tracks while it computes the loss of a global batch.

    The loss itself is known. As in Keras' own steps, the parameters have not changed yet.
    """
    if overrides(model, "compute_loss"):
        own_loss(model, x, y, y_pred, sample_weight, training)
    elif tracks_outputs(model, y_pred):
        loss_internals.track_output_losses(model, y, y_pred, sample_weight)


def update_metrics(
    model: keras.Model, loss: tf.Tensor, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> dict[str, tf.Tensor]:
    """Updates metrics with a global batch, as Keras' own steps do after the update."""
    loss_tracker(model).update_state(loss, sample_weight=batch_size(x))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def tracks_outputs(model: keras.Model, y_pred: Any) -> bool:
    """Whether Keras shows the value of each loss beside the total."""
    loss, _ = loss_internals.compiled_loss(model)
    if loss is None or overrides(model, "compute_loss"):
        return False
    return len([each for each in keras.tree.flatten(loss) if each is not None]) > 1 or (
        not keras.tree.is_nested(loss) and len(tf.nest.flatten(y_pred)) > 1
    )


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model's own class replaces one of Keras' methods."""
    return getattr(model.__class__, name) is not getattr(keras.Model, name)


def own_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """The class's own `compute_loss`, which may be older than the argument `training`."""
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    options = {"training": training} if takes_training else {}
    return model.compute_loss(x, y, y_pred, sample_weight, **options)
