"""Running means of the loss and of any Keras metrics over the global batch."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.machine.keras_internals import loss_tracker
from towers.step.sharding import batch_size


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

    def update(
        self, loss: tf.Tensor, x: Any, y: Any, predictions: Any
    ) -> dict[str, tf.Tensor]:
        """Adds one global batch; returns {"loss": ..., metric: ...} over all since `reset`.

        Args:
            loss: the global batch's loss, a scalar.
            x: its inputs; only their number counts.
            y: its labels.
            predictions: the model's outputs for it, carrying their masks; None where no metric
                needs them.
        """
        with tf.device(self._device):
            loss_tracker(self._holder).update_state(loss, sample_weight=batch_size(x))
            if not self.need_predictions:
                return self._holder.get_metrics_result()
            return self._holder.compute_metrics(None, y, predictions)

    def result(self) -> dict[str, tf.Tensor]:
        """{"loss": ..., metric: ...} over all batches since `reset`."""
        with tf.device(self._device):
            return self._holder.get_metrics_result()

    def build(self, y: Any, predictions: Any) -> None:
        """Makes the metrics' variables, which depend on the outputs' shapes.

        A tf.function in which variables are made is traced a second time: do this before.

        Args:
            y, predictions: what `update` will be given, or specs of it.
        """
        if self.need_predictions and not self._is_built:
            with tf.device(self._device):
                y, predictions = tf.nest.map_structure(one_row, (y, predictions))
                self._holder.compute_metrics(None, y, predictions)
                self.reset()
            self._is_built = True

    def reset(self) -> None:
        """Forgets all batches."""
        self._holder.reset_metrics()

    @property
    def variables(self) -> list[keras.Variable]:
        """The running sums."""
        return self._holder.metrics_variables


def one_row(tensor: tf.TensorSpec) -> tf.Tensor:
    """One row of zeros with a tensor's dtype and shape."""
    return tf.zeros([1, *(size or 1 for size in tensor.shape[1:])], tensor.dtype)


class _MetricsHolder(keras.Model):
    """A model without layers: it only lends us Keras' handling of `compile(metrics=...)`."""
