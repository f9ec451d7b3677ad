"""A model's own `compute_loss` inside of a tower."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import tensorflow as tf


@dataclass(frozen=True)
class ModelLoss:
    """A model's own `compute_loss`, a batch mean, in place of one loss for each output.

    compute: (x, y, y_pred, sample_weight, training) -> scalar.
    """

    compute: Callable


@contextmanager
def trackers_kept_out(model: keras.Model, scope: keras.StatelessScope) -> Iterator[None]:
    """Within, what a `compute_loss` tracks is no tower's to keep: Keras' loop runs it on all
    predictions.

    Raises:
        ValueError: layers add losses, too: they exist in the towers alone, and would be missing.
    """
    trackers = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    scope.state_mapping.update({id(v): zero for v, zero in trackers})
    yield
    if scope.losses and any(scope.get_current_value(v) is not zero for v, zero in trackers):
        raise ValueError(
            "compute_loss updates a metric, and layers add losses with add_loss: the metric would "
            "miss them. Update the metric in compute_metrics instead."
        )
