"""A model's state: what goes into each tower, and how the towers' new states become one.

| state                 | into tower t                           | after the step              |
| --------------------- | -------------------------------------- | --------------------------- |
| BatchNorm statistics  | as they are                            | weighted mean, or tower 0's |
| random seeds          | tower 0: as they are; t: folded with t | tower 0's: advanced once    |
| the rest              | as it is                               | see `assigned`              |
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.machine.devices import HOST, short_name
from towers.machine.keras_internals import all_layers

_SEED = "seed_generator_state"  # the name that Keras gives the state of every SeedGenerator


def is_seed(variable: Any) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`, in a layer or not."""
    return variable.name == _SEED


def statistics(
    model: keras.Model, synchronized: Sequence[keras.layers.Layer] = ()
) -> list[keras.Variable]:
    """The statistics of a model's BatchNormalization layers, in the order of its state.

    Args:
        synchronized: layers whose statistics are equal in all towers, and left out.
    """
    found = {
        id(variable)
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and layer not in synchronized
        for variable in layer.non_trainable_weights
        if tf.as_dtype(variable.dtype).is_floating  # a subclass may count its steps
    }
    return [v for v in model.non_trainable_variables if id(v) in found]


def tower_seeds(seeds: Sequence[tf.Tensor], tower_index: int) -> list[tf.Tensor]:
    """The random seeds that tower `tower_index` starts from.

    Tower 0 keeps them as they are, so that one tower computes what Keras does.

    Args:
        seeds: int64 vectors [seed, counter], of the model.
        tower_index: 0 ... T - 1.
    """
    if tower_index == 0:
        return list(seeds)
    fold = tf.random.experimental.stateless_fold_in
    return [tf.cast(fold(tf.cast(seed, tf.int32), tower_index), seed.dtype) for seed in seeds]


def variables_device(model: keras.Model) -> str:
    """The device of the model's parameters, such as "/cpu:0"; "/cpu:0" where it has none.

    Of several devices, that of the first that is trained; the states of random seeds come last, as
    a layer makes its own before it is built.
    """
    variables = [*model.trainable_variables, *model.weights, *model.variables]
    return short_name(variables[0].value.device) if variables else HOST


def digest(variable: keras.Variable) -> str:
    """A digest of a variable's bits and shape: 16 hexadecimal digits of their SHA-256."""
    value = variable.value.numpy()
    return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()[:16]
