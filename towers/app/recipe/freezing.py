"""Variables that stay as they are while the others are trained."""

import re

import keras

from towers.machine.keras_internals import all_layers


def freeze(model: keras.Model, pattern: str) -> str:
    """Takes the variables in whose path `pattern` is found out of the training.

    A layer all of whose variables are found is frozen as Keras freezes layers: BatchNormalization
    then normalizes by its statistics, and keeps them.

    Args:
        model: a built model, before anything is made for its trainable variables.
        pattern: a regular expression.

    Returns:
        What was frozen, in words.

    Raises:
        ValueError: no variable, or every one, is found.
    """
    before = model.trainable_variables
    for layer in all_layers(model):
        own = layer.weights
        if own and layer is not model and all(_is_found(pattern, v) for v in own):
            layer.trainable = False
    for variable in model.trainable_variables:
        if _is_found(pattern, variable):
            variable.trainable = False
    left = model.trainable_variables
    frozen = [v for v in before if not any(v is other for other in left)]
    if not frozen:
        examples = ", ".join(v.path for v in before[:3])
        raise ValueError(
            f"freeze ({pattern!r}) is found in no trainable variable's path. There are "
            f"{len(before)}, such as {examples}."
        )
    if not left:
        raise ValueError(f"freeze ({pattern!r}) leaves no variable to train.")
    count = sum(v.value.shape.num_elements() for v in frozen)
    return f"{len(frozen)} of {len(before)} trainable variables frozen, {count:,} parameters"


def _is_found(pattern: str, variable: keras.Variable) -> bool:
    return re.search(pattern, variable.path) is not None
