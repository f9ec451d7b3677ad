"""Freezes layers, which keep their values while the other layers are trained."""

import re

import keras

from towers.machine.keras_internals import all_layers


def freeze(model: keras.Model, pattern: str) -> str:
    """Freezes, as in Keras, each layer if `pattern` is found in the paths of all its variables.

    A frozen BatchNormalization layer uses its moving statistics and does not update them.

    Args:
        model: a built model, before a step is made for its trainable variables.
        pattern: a regular expression, such as ^(conv1|bn)/.

    Returns:
        A line about the number of frozen variables.

    Raises:
        ValueError: `pattern` fits no trainable variable, all of them, or only a part of a layer.
    """
    before = model.trainable_variables
    found = {id(v) for v in model.weights if re.search(pattern, v.path)}
    for layer in all_layers(model):
        if layer is not model and layer.weights and found >= set(map(id, layer.weights)):
            layer.trainable = False
    left = {id(v): v.path for v in model.trainable_variables}
    parts = [path for key, path in left.items() if key in found]
    if parts:
        raise ValueError(
            f"freeze ({pattern!r}) is found in {parts[0]}, and not in every variable of its layer. "
            "Name whole layers, such as ^conv1/."
        )
    frozen = [v for v in before if id(v) not in left]
    if not frozen:
        raise ValueError(
            f"freeze ({pattern!r}) is found in no trainable variable's path. There are "
            f"{len(before)}, such as {', '.join(v.path for v in before[:3])}."
        )
    if not left:
        raise ValueError(f"freeze ({pattern!r}) leaves no variable to train.")
    count = sum(v.value.shape.num_elements() for v in frozen)
    return f"{len(frozen)} of {len(before)} trainable variables frozen, {count:,} parameters"
