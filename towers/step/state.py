"""A model's state: what goes into each tower, and how the towers' new states become one.

| state                 | into tower t                           | after the step              |
| --------------------- | -------------------------------------- | --------------------------- |
| BatchNorm statistics  | as they are                            | weighted mean, or tower 0's |
| random seeds          | tower 0: as they are; t: folded with t | tower 0's: advanced once    |
| the rest              | as it is                               | see `assigned`              |
"""

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


def tower_state(
    state: Sequence[tf.Tensor], seeds: Sequence[int], tower_index: int
) -> list[tf.Tensor]:
    """The state that tower `tower_index` starts from: its own seeds, the rest as it is.

    Tower 0 keeps the seeds as they are, so that one tower computes what Keras does.

    Args:
        state: the values of `model.non_trainable_variables`.
        seeds: which of them are random seeds: int64 vectors [seed, counter].
        tower_index: 0 ... T - 1.
    """
    values = list(state)
    if tower_index > 0:
        for i in seeds:
            seed = tf.cast(values[i], tf.int32)
            folded = tf.random.experimental.stateless_fold_in(seed, tower_index)
            values[i] = tf.cast(folded, values[i].dtype)
    return values


def variables_device(model: keras.Model) -> str:
    """The device of the model's parameters, such as "/cpu:0"; "/cpu:0" where it has none.

    Of several devices, that of the first that is trained; the states of random seeds come last, as
    a layer makes its own before it is built.
    """
    variables = [*model.trainable_variables, *model.weights, *model.variables]
    return short_name(variables[0].value.device) if variables else HOST
