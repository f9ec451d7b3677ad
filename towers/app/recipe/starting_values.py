"""Gives a model the values of another, saved model, for the field `init_from`."""

from collections.abc import Sequence
from pathlib import Path

import keras

from towers.app.config import TrainConfig
from towers.app.models import load_file

_LISTED = 6  # a line names this many variables and counts the rest


def take_values(model: keras.Model, config: TrainConfig, begun: Path = Path()) -> str | None:
    """Assigns the values in `init_from` to a model's variables with equal names and shapes.

    A resumed run has its values in its checkpoint, so its file may be missing.

    Args:
        model: a built model.
        config: the configuration, whose `init_from` names the file.
        begun: the directory in which a relative path begins.

    Returns:
        A line with the number of variables found and the missing ones; None without a file.

    Raises:
        ValueError: the file cannot be read, or none of its variables fits.
    """
    path = config.init_from
    if path is None or config.resume is not None and not (begun / path).exists():
        return None
    check_file(config, begun)
    saved = load_file(begun / path, "init_from", compile=False)
    sources = list(zip(_names(saved), saved.weights, strict=True))
    missing = []
    for variable, name in zip(model.weights, _names(model), strict=True):
        found = [v for key, v in sources if _is_same(name, key) and v.shape == variable.shape]
        if len(found) == 1:
            variable.assign(found[0].value)
        else:
            missing.append(f"{name} {list(variable.shape)}")
    count, total = len(model.weights) - len(missing), len(model.weights)
    if count == 0:
        raise ValueError(
            f"init_from ({path}) holds no variable of this model's names and shapes. It holds "
            f"{_listed([f'{name} {list(v.shape)}' for name, v in sources])}; the model "
            f"has {_listed(missing)}."
        )
    text = f"{count} of {total} variables begin with the values in {path}"
    return f"{text}; not found in it: {_listed(missing)}" if missing else text


def check_file(config: TrainConfig, begun: Path = Path()) -> None:
    """Raises ValueError if `init_from` is set but is not a file."""
    if config.init_from is not None and not (begun / config.init_from).is_file():
        raise ValueError(f"init_from ({config.init_from}) is no file; name a .keras file.")


def _names(model: keras.Model) -> list[str]:
    """Returns the variables' paths without the model's name, which may differ each time."""
    return [v.path.removeprefix(f"{model.name}/") for v in model.weights]


def _is_same(name: str, other: str) -> bool:
    """Returns whether one name ends with the other at a layer's name, such as "dense/kernel"."""
    shorter, longer = sorted((name, other), key=len)
    return name == other or "/" in shorter and longer.endswith(f"/{shorter}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
