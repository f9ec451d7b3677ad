"""Holds Keras' private names for losses, metrics and masks; see `keras_internals`."""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.trainers import compile_utils

from towers.machine.replaced import ONE_AT_A_TIME, replaced_by


def keras_mask(tensor: Any) -> tf.Tensor | None:
    """Returns the mask that a layer, or a loss with `ignore_class`, left on its output, or None."""
    return getattr(tensor, "_keras_mask", None)


_ACTIVATIONS = {"Sigmoid": tf.nn.sigmoid, "Softmax": tf.nn.softmax}


def marks_of(tensor: tf.Tensor) -> dict[str, tf.Tensor]:
    """Returns the mask and the logits that Keras' losses and metrics look for beside a tensor.

    The keys are "mask", "logits" (an attribute that `keras.activations` sets), and "Sigmoid" or
    "Softmax" (the input of this operation, if it made the tensor). Keras computes crossentropies
    from the last three (`_get_logits` in keras/src/backend/tensorflow/nn.py).
    """
    graph = getattr(tensor, "graph", None)
    marks = {"mask": keras_mask(tensor), "logits": getattr(tensor, "_keras_logits", None)}
    operation = tensor.op if tf.is_symbolic_tensor(tensor) else None
    if marks["logits"] is None and operation is not None and operation.type in _ACTIVATIONS:
        marks[operation.type] = operation.inputs[0]
    return {
        name: mark for name, mark in marks.items()
        if mark is not None and getattr(mark, "graph", None) is graph
    }


def marked(tensor: tf.Tensor, marks: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Attaches what `marks_of` returned to a tensor; returns the tensor."""
    # Keras looks for the operation Sigmoid or Softmax itself, so it is applied again.
    for kind, activation in _ACTIVATIONS.items():
        if kind in marks:
            tensor = activation(marks[kind])
    if "mask" in marks:
        tensor._keras_mask = marks["mask"]
    if "logits" in marks:
        tensor._keras_logits = marks["logits"]
    return tensor


def function_loss(function: Callable) -> keras.losses.Loss:
    """Returns the Loss that Keras makes from a function (y_true, y_pred): a mean over examples."""
    return keras.losses.MeanSquaredError.__base__(function)


def compile_arguments(model: keras.Model) -> tuple[Any, Any, Any, Any]:
    """Returns the (loss, loss weights, metrics, weighted metrics) that a model was compiled with.

    Each may be None. The public form is serialized, in which custom functions are lost.
    """
    loss, metrics = model._compile_loss, model._compile_metrics
    return (
        getattr(loss, "_user_loss", None), getattr(loss, "_user_loss_weights", None),
        getattr(metrics, "_user_metrics", None), getattr(metrics, "_user_weighted_metrics", None),
    )


class LossTerm(NamedTuple):
    """Describes one loss of a compiled model, its weight in the total and its arguments."""

    loss: keras.losses.Loss
    factor: float
    y: Any
    y_pred: Any
    sample_weight: Any


class LossTerms(compile_utils.CompileLoss):
    """Matches the losses given to `compile` with labels, outputs and weights as Keras does.

    Keras does so only while it computes the total, so here each loss records its arguments.
    """

    def __init__(self, loss: Any, loss_weights: Any, output_names: Sequence[str] | None) -> None:
        if isinstance(loss_weights, int):
            loss_weights = float(loss_weights)
        super().__init__(loss, loss_weights, output_names=output_names)
        self._resolved: list[Any] = []
        self._noted: list[LossTerm] = []

    def terms(self, y: Any, y_pred: Any, sample_weight: Any) -> list[LossTerm]:
        """Returns the terms of the total; raises ValueError or KeyError if structures differ."""
        self._noted = []
        with tf.init_scope(), tf.device("/cpu:0"):
            self.call(y, y_pred, sample_weight)
        # For one output, Keras computes only the first loss of a list.
        is_one = not keras.tree.is_nested(y) and not keras.tree.is_nested(y_pred)
        return self._noted[:1] if is_one else self._noted

    def build(self, y_true: Any, y_pred: Any) -> None:
        # Keras would make a metric for each loss, whose variables make TensorFlow trace twice.
        without_metrics = types.SimpleNamespace(Mean=lambda name: None)
        with ONE_AT_A_TIME, replaced_by(compile_utils, "metrics_module", without_metrics):
            super().build(y_true, y_pred)
        self._resolved = list(vars(self)["_flat_losses"])
        self._flat_losses = [
            each._replace(loss=functools.partial(self._note, each), loss_weights=None)
            for each in self._resolved
        ]

    @property
    def metrics(self) -> list[None]:
        """Returns None for each loss, because no loss here has a metric."""
        return [None] * len(self._resolved)

    def _note(self, resolved: Any, y: Any, y_pred: Any, sample_weight: Any) -> float:
        factor = 1.0 if resolved.loss_weights is None else resolved.loss_weights
        self._noted.append(LossTerm(resolved.loss, factor, y, y_pred, sample_weight))
        return 0.0


def track_output_losses(model: keras.Model, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Updates the running mean of each output's loss, which Keras shows beside the total."""
    # `model.compute_loss` would add the losses of layers, which are in another graph.
    model._compile_loss(y, y_pred, sample_weight)


def compiled_metrics(model: keras.Model) -> Any:
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
