"""The options that a script gives its optimizers: they must not differ when a run resumes."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras

from towers.resume.checkpoints import json_copy

OPTIONS = "options"  # in a checkpoint's state
_LAMBDA = "__lambda__"

# For each optimizer: the options that the script gave it, and those at the end of the last run.
_seen: WeakKeyDictionary = WeakKeyDictionary()


@contextmanager
def compared(optimizers: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Gives {"optimizer.learning_rate": 0.001, ...} as the script has set it; runs a fit within.

    Callbacks may change the learning rate within. A later run in this process may have the same
    optimizer object. It is then compared by the script's values, unless the script changes them.

    Args:
        optimizers: optimizers by name; values that are no optimizer are ignored.
    """
    named = {n: o for n, o in optimizers.items() if isinstance(o, keras.optimizers.Optimizer)}
    told: dict[str, dict[str, Any]] = {}
    for name, optimizer in named.items():
        now = _options(optimizer)
        before, left = _seen.get(optimizer, (now, now))
        told[name] = before if now == left else now
    try:
        yield {f"{name}.{key}": v for name, options in told.items() for key, v in options.items()}
    finally:
        for name, optimizer in named.items():
            _seen[optimizer] = told[name], _options(optimizer)


def _options(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """An optimizer's arguments; none where it cannot tell them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lambdas, which are left out
            config = keras.saving.serialize_keras_object(optimizer)["config"]
        return dict(_flat(config, ""))
    except Exception:  # of a user's get_config()
        return {}


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """("learning_rate", "CosineDecay"), ("learning_rate.decay_steps", 100) and so on.

    Names are left out, as they count the objects of a process; so is what is no JSON.
    """
    for name, value in config.items():
        if name == "name":
            continue
        if isinstance(value, dict) and "class_name" in value:
            kind, value = value["class_name"], value["config"]
            if kind == _LAMBDA:
                continue
            if isinstance(value, dict):
                yield f"{prefix}{name}", kind
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if isinstance(value, float):
            value = float(f"{value:.7g}")  # 0.1, not float32's 0.10000000149
        try:
            yield f"{prefix}{name}", json_copy(value)
        except ValueError:
            continue
