"""Changes a built model before training: frozen layers, and the values of a saved model."""

import re
from collections.abc import Sequence
from pathlib import Path

import keras

from towers.app.config import TrainConfig
from towers.app.models import load_file
from towers.machine.keras_internals import all_layers


def freeze(model: keras.Model, pattern: str) -> str:
    """Freezes, as in Keras, each layer if `pattern` is found in the paths of all its variables.

    Returns a line about their number. pattern: a regular expression, such as ^(conv1|bn)/.
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


def take_values(model: keras.Model, config: TrainConfig, begun: Path = Path()) -> list[str]:
    """Assigns the values in `init_from` to a built model's variables with equal names and shapes.

    Returns a line with the number of variables found and the missing ones. A resumed run has its
    values in its checkpoint, so its file may be missing: no line. A relative path begins in
    `begun`.
    """
    path = str(config.init_from)
    if config.resume is not None and not (begun / path).exists():
        return []
    saved = load_file(begun / path, "init_from", compile=False)
    sources = list(zip(_names(saved), saved.weights, strict=True))
    missing = []
    for variable, name in zip(model.weights, _names(model), strict=True):
        found = [v for key, v in sources if _is_same(name, key) and v.shape == variable.shape]
        if len(found) == 1:
            variable.assign(found[0].value)
        else:
            missing.append(f"{name} {list(variable.shape)}")
    total = len(model.weights)
    if len(missing) == total:
        held = _listed([f"{name} {list(v.shape)}" for name, v in sources])
        raise ValueError(
            f"init_from ({path}) holds no variable of this model's names and shapes. It holds "
            f"{held}; the model has {_listed(missing)}."
        )
    text = f"{total - len(missing)} of {total} variables begin with the values in {path}"
    if missing:
        text += f"; not found in it: {_listed(missing)}"
    return [text]


def _names(model: keras.Model) -> list[str]:
    """Returns the variables' paths without the model's name, which may differ each time."""
    return [v.path.removeprefix(f"{model.name}/") for v in model.weights]


def _is_same(name: str, other: str) -> bool:
    """Returns whether one name ends with the other at a layer's name, such as "dense/kernel"."""
    shorter, longer = sorted((name, other), key=len)
    return name == other or "/" in shorter and longer.endswith(f"/{shorter}")


def _listed(names: Sequence[str]) -> str:
    """Returns the first six names, and the number of the others."""
    text = ", ".join(names[:6])
    if len(names) > 6:
        text += f" and {len(names) - 6} more"
    return text
