"""Builds a parallel model's layers ahead of its first step, which must find all variables."""

from contextlib import suppress
from typing import Any

import keras
import tensorflow as tf

from towers.machine import keras_internals
from towers.overrides import overrides, own_loss
from towers.step.structures import symbolic


def build(model: keras.Model, x: Any) -> None:
    """Builds a model that is not built yet, on the CPU.

    Layers count, too: `build` of a subclassed model may leave its layers without variables.
    """
    base = model._towers.base
    if not _is_built(base):
        with tf.device("/cpu:0"):
            base(tf.nest.map_structure(symbolic, x))
    if not model.built:
        take_over(model)


def build_loss(model: keras.Model, *batch: Any) -> None:
    """Builds the layers that a `compute_loss` alone calls, as a distillation's teacher is one.

    Args:
        batch: specs of x, y and sample_weight.
    """
    with tf.init_scope(), tf.device("/cpu:0"):
        build(model, batch[0])
        if overrides(model, "compute_loss") and not _is_built(model):

            def compute(x: Any, y: Any, sample_weight: Any) -> Any:
                return own_loss(model, x, y, model(x, training=True), sample_weight, True)

            with suppress(Exception):  # the step fails again, and names the line
                tf.function(compute, autograph=False).get_concrete_function(*batch)


def _is_built(model: keras.Model) -> bool:
    return all(layer.built for layer in keras_internals.all_layers(model))


def take_over(model: keras.Model) -> None:
    """Takes the attributes that building has changed in the base, save those changed here, too."""
    before, current = model._towers.unbuilt, vars(model)
    changed = {
        key: value
        for key, value in vars(model._towers.base).items()
        if before.get(key) is not value
        and before.get(key) is current.get(key)
        and not key.endswith("_function")
    }
    model.__dict__.update(changed, built=True)
