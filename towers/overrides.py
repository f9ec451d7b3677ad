"""Which of Keras' methods a model's class replaces, and the loss that it then computes itself."""

import inspect
from collections.abc import Callable
from typing import Any

import keras


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model's own class replaces one of Keras' methods."""
    method: Callable = getattr(model.__class__, name)
    return method is not getattr(keras.Model, name)


def own_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """The class's own `compute_loss`, which may be older than the argument `training`."""
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    options = {"training": training} if takes_training else {}
    return model.compute_loss(x, y, y_pred, sample_weight, **options)
