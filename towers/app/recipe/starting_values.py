"""`init_from`: a model begins with the values of another one that was saved."""

from collections.abc import Sequence
from pathlib import Path

import keras

from towers.app.config import TrainConfig
from towers.app.models import load_file

_LISTED = 6  # variables that a line names; the rest are counted


def take_values(model: keras.Model, config: TrainConfig, begun: Path = Path()) -> str | None:
    """Gives a model's variables the values of those of the same name and shape in `init_from`.

    A run that goes on has its values in its checkpoint: then the file may be gone.

    Args:
        model: a built model.
        config: names the file.
        begun: the directory in which a relative path begins.

    Returns:
        How many were found and which were not, in words; None where nothing was done.

    Raises:
        ValueError: the file cannot be read, or nothing in it fits.
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
    """Raises ValueError where a run begins with the values of a file, and there is none."""
    if config.init_from is not None and not (begun / config.init_from).is_file():
        raise ValueError(f"init_from ({config.init_from}) is no file; name a .keras file.")


def _names(model: keras.Model) -> list[str]:
    """The variables' paths below the model, whose own name may be another one each time."""
    return [v.path.removeprefix(f"{model.name}/") for v in model.weights]


def _is_same(name: str, other: str) -> bool:
    """Whether one name ends with the other, from a layer's name on: "dense/kernel"."""
    shorter, longer = sorted((name, other), key=len)
    return name == other or "/" in shorter and longer.endswith(f"/{shorter}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
