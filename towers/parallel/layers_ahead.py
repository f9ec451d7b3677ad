"""Builds the layers of a parallel model before its first step, which needs all variables."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine import keras_internals, loss_internals
from towers.step.metrics import overrides, call_compute_loss, tracks_outputs
from towers.step.structures import one_row

_ABSENT = object()  # marks a missing attribute; None may be a value


class Base(NamedTuple):
    """Holds the model that was given to `make_parallel`.

    model: the plain model; it shares its layers and variables with the parallel model.
    unbuilt: its attributes before it was built, by name.
    parameter_device: the device to build it on.
    """

    model: keras.Model
    unbuilt: Mapping[str, Any]
    parameter_device: str


def build(model: keras.Model, base: Base, x: Any) -> None:
    """Builds the model on `base.parameter_device` if it or one of its layers is not built yet.

    The layers are checked because `build` of a subclassed model may leave them without variables.
    The model is traced, as Keras' `fit` does. Keras' symbolic tensors do not pass through every
    layer, such as a layer without shape inference in an unbuilt Sequential model.

    Args:
        model: the parallel model.
        base: the plain model, which is traced.
        x: specs of the inputs.
    """
    if not _is_built(base.model):
        with tf.init_scope(), tf.device(base.parameter_device):
            tf.function(base.model, autograph=False).get_concrete_function(x)
    if not model.built:
        take_over(model, base)


def build_loss(model: keras.Model, base: Base, *batch: Any) -> None:
    """Builds the layers that only `compute_loss` calls, such as the teacher in distillation.

    Args:
        model, base: the parallel model and its plain model.
        batch: specs of x, y and sample_weight.
    """
    with tf.init_scope(), tf.device(base.parameter_device):
        build(model, base, batch[0])
        if overrides(model, "compute_loss") and not _is_built(model):

            def compute(x: Any, y: Any, sample_weight: Any) -> Any:
                return call_compute_loss(model, x, y, model(x, training=True), sample_weight, True)

            with suppress(Exception):  # the step raises the error again, with its line
                tf.function(compute, autograph=False).get_concrete_function(*batch)


def take_over(model: keras.Model, base: Base) -> None:
    """Copies the attributes that `build` changed on the base, unless `model` changed them too.

    An attribute that `build` made counts as changed even if it is None, as in `Dense.build`.
    """
    before, current = base.unbuilt, vars(model)
    changed = {
        key: value
        for key, value in vars(base.model).items()
        if before.get(key, _ABSENT) is not value
        and before.get(key, _ABSENT) is current.get(key, _ABSENT)
        and not key.endswith("_function")
    }
    model.__dict__.update(changed, built=True)


def _is_built(model: keras.Model) -> bool:
    return all(layer.built for layer in keras_internals.all_layers(model))


def track_outputs(model: keras.Model, parameter_device: str, y: Any, y_pred: Any) -> None:
    """Creates the running mean of each output's loss, if there are several outputs.

    Keras would create the means when it first computes the losses. Existing means are kept.

    Args:
        model: a compiled model. parameter_device: the device for the variables of the means.
        y, y_pred: specs or tensors of the labels and outputs.
    """
    if tracks_outputs(model, y_pred) and not loss_internals.has_output_losses(model):
        with tf.device(parameter_device):
            y, y_pred = one_row((y, y_pred))
            loss_internals.track_output_losses(model, y, y_pred, None)
        model.reset_metrics()
