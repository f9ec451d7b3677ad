"""Reads and resets the running means of the loss and the metrics of a compiled model."""

import inspect
import math

import keras
import tensorflow as tf

from towers.machine.loss_internals import loss_tracker
from towers.step.structures import Structure


class BatchMetrics:
    """The loss and the metrics that a model was compiled with.

    names: the keys of a step's logs, in order; known after its trace.
    """

    def __init__(self, model: keras.Model, device: str) -> None:
        """The variables of the metrics of `model` are on `device`."""
        self.model, self._device, self.names = model, device, ["loss"]

    def result(self) -> dict[str, tf.Tensor]:
        """Returns the values since `reset`; those only a custom `compute_metrics` knows are NaN."""
        with tf.device(self._device):
            logs = self.model.get_metrics_result()
            logs = {"loss": loss_tracker(self.model).result(), **logs}
            return {name: logs.get(name, tf.constant(math.nan)) for name in self.names}

    def reset(self) -> None:
        """Resets the loss and all metrics."""
        loss_tracker(self.model).reset_state()
        self.model.reset_metrics()

    @property
    def variables(self) -> list[keras.Variable]:
        """Returns the variables of the loss and the metrics, each once."""
        found = [*loss_tracker(self.model).variables, *self.model.metrics_variables]
        return list({id(v): v for v in found}.values())


def overrides(model: keras.Model, name: str) -> bool:
    """Returns whether the model's class overrides this method of `keras.Model`."""
    return getattr(model.__class__, name) is not getattr(keras.Model, name)


def call_compute_loss(
    model: keras.Model,
    x: Structure,
    y: Structure,
    y_pred: Structure,
    sample_weight: Structure,
    training: bool,
) -> tf.Tensor:
    """Calls a custom `compute_loss`; older ones have no argument `training`."""
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    options = {"training": training} if takes_training else {}
    return model.compute_loss(x, y, y_pred, sample_weight, **options)
