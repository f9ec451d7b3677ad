"""Running means of the loss and of any Keras metrics over the global batch."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.machine.loss_internals import loss_tracker
from towers.step.sharding import batch_size
from towers.step.structures import one_row


class BatchMetrics:
    """Keras' own `compile` metrics, fed with the towers' concatenated predictions.

    A metric over the whole global batch cannot in general be averaged from shards (AUC, top-k over
    masked steps): it sees the predictions of all towers at once, as on one device.
    """

    def __init__(self, metrics: Any, output_names: Sequence[str] | None, device: str) -> None:
        """
        Args:
            metrics: as `keras.Model.compile` takes them.
            output_names: the names of the model's outputs, if it has any.
            device: where the metrics' variables live.
        """
        self._device = device
        self._holder = _MetricsHolder()
        if output_names:
            self._holder.output_names = list(output_names)
        with tf.device(device):
            self._holder.compile(metrics=metrics or None)
        self.need_predictions = bool(metrics)
        self._is_built = False

    def track_losses(
        self, x: Any, y: Any, predictions: Any, sample_weight: Any = None, training: bool = False
    ) -> None:
        """Updates what a model tracks while it computes its loss: before its parameters change."""

    def update(
        self,
        loss: tf.Tensor,
        x: Any,
        y: Any,
        predictions: Any,
        sample_weight: Any = None,
    ) -> dict[str, tf.Tensor]:
        """Adds one global batch; returns {"loss": ..., metric: ...} over all since `reset`.

        Args:
            loss: the global batch's loss, a scalar.
            x: its inputs; only their number counts.
            y: its labels.
            predictions: the model's outputs for it, with their marks; None where no metric
                needs them.
            sample_weight: of the batch, for metrics that ask for it.
        """
        del sample_weight
        with tf.device(self._device):
            loss_tracker(self._holder).update_state(loss, sample_weight=batch_size(x))
            if not self.need_predictions:
                return self._holder.get_metrics_result()
            return self._holder.compute_metrics(None, y, predictions)

    def result(self) -> dict[str, tf.Tensor]:
        """{"loss": ..., metric: ...} over all batches since `reset`."""
        with tf.device(self._device):
            return self._holder.get_metrics_result()

    def build(self, y: Any, predictions: Any, x: Any = None, sample_weight: Any = None) -> None:
        """Makes the metrics' variables, which depend on the outputs' shapes.

        A tf.function in which variables are made is traced a second time: do this before.

        Args:
            y, predictions, x, sample_weight: what `update` will be given, or specs of it.
        """
        del x, sample_weight
        if self.need_predictions and not self._is_built:
            with tf.device(self._device):
                self._holder.compute_metrics(None, *one_row((y, predictions)))
                self.reset()
            self._is_built = True

    def reset(self) -> None:
        """Forgets all batches."""
        self._holder.reset_metrics()

    @property
    def variables(self) -> list[keras.Variable]:
        """The running sums."""
        return self._holder.metrics_variables


class _MetricsHolder(keras.Model):
    """A model without layers: it only lends us Keras' handling of `compile(metrics=...)`."""
