"""Holds Keras' private names for losses and metrics; see `keras_internals`."""

from typing import Any

import keras


def compile_arguments(model: keras.Model) -> tuple[Any, Any, Any, Any]:
    """Returns the (loss, loss weights, metrics, weighted metrics) that a model was compiled with.

    Each may be None. The public form is serialized, in which custom functions are lost.
    """
    loss, metrics = model._compile_loss, model._compile_metrics
    return (
        getattr(loss, "_user_loss", None),
        getattr(loss, "_user_loss_weights", None),
        getattr(metrics, "_user_metrics", None),
        getattr(metrics, "_user_weighted_metrics", None),
    )


def compiled_metrics(model: keras.Model) -> keras.metrics.Metric | None:
    """Returns the object that computes a compiled model's metrics; None if there are none."""
    return model._compile_metrics


def metric_direction(metric: keras.metrics.Metric | None) -> str | None:
    """Returns "up" if higher values of a metric are better, "down" if lower; None if unknown."""
    return getattr(metric, "_direction", None)


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Returns the mean of a compiled model's loss, even if its class overrides `metrics`."""
    return keras.Model.metrics.fget(model)[0]


def forget_recipe(model: keras.Model) -> None:
    """Removes losses and metrics of an earlier `compile`, which a new one without them keeps."""
    vars(model).update(_compile_loss=None, _compile_metrics=None)
