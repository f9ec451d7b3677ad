"""Tells where a model's variables are, and whether two models have the same weights."""

import hashlib
from typing import Any

import keras

from towers.machine.devices import HOST, short_name


def variables_device(model: keras.Model) -> str:
    """Returns the device of the model's first trainable variable; "/cpu:0" without variables."""
    # Random seeds come last: a layer creates them before it is built, maybe on another device.
    variables = [*model.trainable_variables, *model.weights, *model.variables]
    return short_name(variables[0].value.device) if variables else HOST


def digest(model: keras.Model) -> str:
    """Returns eight hexadecimal digits that tell whether two models have the same weights.

    They begin the SHA-256 of the bytes of all values of `model.weights`, in their order. Seeds of
    random numbers and metrics do not count.

    Args:
        model: a model with weights. A model that has only trained by its own `train_step` counts
            as not built in Keras, and has weights all the same.

    Raises:
        ValueError: the model has no weights yet, because it is not built.
    """
    if not model.built and not model.weights:
        raise ValueError(f"model ({model.name}) is not built. Call it on a batch, or `build` it.")
    found = hashlib.sha256()
    for weight in model.weights:
        found.update(weight.numpy().tobytes())
    return found.hexdigest()[:8]


def variable_digest(variable: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a variable's dtype, shape and bits."""
    value = variable.value.numpy()
    return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()[:16]
