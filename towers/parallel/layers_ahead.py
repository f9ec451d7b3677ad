"""Builds a parallel model's layers ahead of its first step, which must find all variables."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine import keras_internals, loss_internals
from towers.step.metrics import overrides, own_loss, tracks_outputs
from towers.step.structures import one_row

_ABSENT = object()  # stands for an attribute that is not there, as None may be a value


class Base(NamedTuple):
    """The model that a parallel one is of.

    model: the same layers and variables. unbuilt: its attributes as they were when it was taken.
    home: the device to build it on.
    """

    model: keras.Model
    unbuilt: Mapping[str, Any]
    home: str


def build(model: keras.Model, base: Base, x: Any) -> None:
    """Builds a model that is not built yet, at home.

    Layers count, too: `build` of a subclassed model may leave its layers without variables. The
    model is traced, as Keras' own `fit` builds it: symbolic tensors of Keras do not pass through
    every layer, such as one without shape inference in an unbuilt Sequential model.

    Args:
        model: the parallel model.
        base: the model that it is of.
        x: specs of its inputs.
    """
    if not _is_built(base.model):
        with tf.init_scope(), tf.device(base.home):
            tf.function(base.model, autograph=False).get_concrete_function(x)
    if not model.built:
        take_over(model, base)


def build_loss(model: keras.Model, base: Base, *batch: Any) -> None:
    """Builds the layers that a `compute_loss` alone calls, as a distillation's teacher is one.

    Args:
        model, base: as for `build`.
        batch: specs of x, y and sample_weight.
    """
    with tf.init_scope(), tf.device(base.home):
        build(model, base, batch[0])
        if overrides(model, "compute_loss") and not _is_built(model):

            def compute(x: Any, y: Any, sample_weight: Any) -> Any:
                return own_loss(model, x, y, model(x, training=True), sample_weight, True)

            with suppress(Exception):  # the step fails again, and names the line
                tf.function(compute, autograph=False).get_concrete_function(*batch)


def take_over(model: keras.Model, base: Base) -> None:
    """Copies the attributes that `build` changed on the base, except those that also changed here.

    An attribute that `build` made counts as changed, with whatever value: `Dense.build` sets None.
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


def track_outputs(model: keras.Model, home: str, y: Any, y_pred: Any) -> None:
    """Makes the means of several outputs' losses, which Keras makes where it first computes them.

    Those that are there stay as they are.

    Args:
        model: compiled.
        home: the device that they are made on.
        y, y_pred: specs or tensors of labels and outputs.
    """
    if tracks_outputs(model, y_pred) and not loss_internals.has_output_losses(model):
        with tf.device(home):
            y, y_pred = one_row((y, y_pred))
            loss_internals.track_output_losses(model, y, y_pred, None)
        model.reset_metrics()
