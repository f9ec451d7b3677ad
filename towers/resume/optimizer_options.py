"""Reads the options that a script gives its optimizers, which must not differ in a resumed run."""

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
    """Gives a fit the options of the script, {"optimizer.learning_rate": 0.001, ...}.

    Callbacks may change the learning rate during the fit. If a later fit uses the same optimizer
    object, the options are still the script's, unless the script has changed them.

    Args:
        optimizers: optimizers by name. Values that are not optimizers are ignored.
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
    """Returns the flat arguments of an optimizer; {} if its get_config() fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about lambdas, which are left out
            config = keras.saving.serialize_keras_object(optimizer)["config"]
        return dict(_flat(config, ""))
    except Exception:  # a custom get_config() may raise anything
        return {}


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields ("learning_rate", "CosineDecay"), ("learning_rate.decay_steps", 100) and so on.

    Names are left out because they count the objects of a process. Values must be JSON.
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
