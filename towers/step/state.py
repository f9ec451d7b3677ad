"""Tells where a model's variables are."""

import keras

from towers.machine.devices import HOST, short_name


def variables_device(model: keras.Model) -> str:
    """Returns the device of the model's first trainable variable; "/cpu:0" without variables."""
    # Random seeds come last: a layer creates them before it is built, maybe on another device.
    variables = [*model.trainable_variables, *model.weights, *model.variables]
    if variables:
        return short_name(variables[0].value.device)
    return HOST
