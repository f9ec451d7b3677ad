"""Makes the Keras optimizer that a configuration names, with the configured arguments."""

import dataclasses
import inspect
from typing import Any

import keras

from towers.app.config import TrainConfig, fields_with
from towers.app.fields import Role
from towers.app.recipe.schedules import Length, make_schedule

_NOT_ALONE = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")


def make_optimizer(config: TrainConfig, name: str, length: Length) -> keras.optimizers.Optimizer:
    """Makes the Keras optimizer with this name; with mixed_float16, it scales the loss.

    Args: name: in upper or lower case. length: the run's length, for the learning-rate schedule.

    Raises:
        ValueError: Keras has no such optimizer, or the optimizer lacks a configured argument.
    """
    classes = {
        key.lower(): value for key, value in vars(keras.optimizers).items()
        if inspect.isclass(value) and issubclass(value, keras.optimizers.Optimizer)
        and key not in _NOT_ALONE
    }
    kind = classes.get(name.lower())
    if kind is None:
        raise ValueError(f"optimizer ({name!r}) must be one of {', '.join(sorted(classes))}.")
    optimizer = kind(**_arguments(config, kind, length))
    if config.precision == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def given(config: TrainConfig) -> list[str]:
    """Returns the names of the configuration's optimizer fields that are not at their defaults."""
    return [
        name for name in fields_with(Role.OPTIMIZER)
        if getattr(config, name) != getattr(TrainConfig, name)
    ]


def override_optimizer(
    optimizer: keras.optimizers.Optimizer, config: TrainConfig, length: Length
) -> keras.optimizers.Optimizer:
    """Returns a compiled model's optimizer with the configured arguments, or its replacement.

    The optimizer keeps its state if at most the learning rate changes; else a new one is made.

    Raises:
        ValueError: the optimizer lacks an argument, or has a schedule that the fields leave as is.
    """
    names = given(config)
    if config.optimizer is not None:
        return make_optimizer(config, config.optimizer, length)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if names == ["learning_rate"] or config.has_schedule and "learning_rate" not in names:
        if isinstance(inner.get_config()["learning_rate"], dict):
            raise ValueError(
                f"learning_rate ({config.learning_rate}) and schedule ({config.schedule}) have no "
                "effect: the model's own optimizer follows a schedule. Leave them out, or give "
                "`optimizer` as well, which replaces both."
            )
        if "learning_rate" not in names:
            config = dataclasses.replace(config, learning_rate=float(inner.learning_rate))
    if names == ["learning_rate"]:
        inner.learning_rate = config.learning_rate
    elif names:
        arguments = _arguments(config, type(inner), length)
        changed = type(inner).from_config({**inner.get_config(), **arguments})
        return changed if inner is optimizer else keras.optimizers.LossScaleOptimizer(changed)
    return optimizer


def shown_rate(optimizer: keras.optimizers.Optimizer, config: TrainConfig) -> float:
    """Returns the current learning rate, or with a warm-up, the rate at the warm-up's end."""
    rate = optimizer.get_config()["learning_rate"] if config.warmup_steps else None
    if not isinstance(rate, dict):
        return float(optimizer.learning_rate)
    return float(keras.optimizers.schedules.deserialize(rate)(config.warmup_steps))


def _arguments(config: TrainConfig, kind: type, length: Length) -> dict[str, Any]:
    """Returns the configured arguments for a class of Keras' optimizers.

    `global_clipnorm` limits the averaged gradients' norm, because the step passes only these.

    Raises:
        ValueError: `momentum` is set, but the class has no such argument.
    """
    parameters = inspect.signature(kind).parameters
    arguments = {
        "momentum": config.momentum, "weight_decay": config.weight_decay,
        "global_clipnorm": config.clip_norm, "ema_momentum": config.ema,
        "use_ema": None if config.ema is None else True,
    }
    if config.learning_rate is not None or config.has_schedule:
        rate = config.learning_rate
        largest = float(parameters["learning_rate"].default) if rate is None else rate
        arguments["learning_rate"] = make_schedule(config, largest, length)
    if config.momentum is not None and "momentum" not in parameters:
        raise ValueError(
            f"momentum ({config.momentum}): {kind.__name__.lower()} has none. Use "
            "optimizer=sgd or optimizer=rmsprop, or leave it out."
        )
    return {name: value for name, value in arguments.items() if value is not None}
