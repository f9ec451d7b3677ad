"""One value for each output of a model, from whatever structure a user gives them in."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.step.sharding import Structure


def per_output(
    value: Any, outputs: Structure, names: Sequence[str] | None, what: str, *, repeat: bool = False
) -> list[Any]:
    """Lays `value` out beside the flattened outputs.

    Args:
        value: one value, or a structure: like `outputs`, a flat list, or a dict by output name.
        outputs: the model's outputs.
        names: their names, where the model has any.
        what: the argument's name, for the error.
        repeat: whether one value stands for every output.

    Returns:
        A list as long as `tf.nest.flatten(outputs)`; None where a dict has no entry.

    Raises:
        ValueError: `value` does not match.
    """
    count = len(tf.nest.flatten(outputs))
    if not tf.nest.is_nested(value):
        if count == 1:
            return [value]
        if repeat or value is None:
            return [value] * count
        raise ValueError(f"{what} is one value, but the model has {count} outputs.")
    if isinstance(value, dict):
        keys = sorted(outputs) if isinstance(outputs, dict) else list(names or [])
        unknown = sorted(set(value) - set(keys))
        if unknown or len(keys) != count:
            raise ValueError(f"{what} names {unknown or sorted(value)}; the outputs are {keys}.")
        return [value.get(key) for key in keys]
    flat = tf.nest.flatten(value)
    if len(flat) != count:
        raise ValueError(f"{what} has {len(flat)} entries, but the model has {count} outputs.")
    return flat
