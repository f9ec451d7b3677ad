"""The optimizer of a configuration: Keras' own, by name, with the arguments that flags give it."""

import dataclasses
import inspect
from typing import Any

import keras

from towers.app.config import TrainConfig, fields_with
from towers.app.fields import Role
from towers.app.recipe.schedules import Length, make_schedule

_NOT_ALONE = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")


def make_optimizer(config: TrainConfig, name: str, length: Length) -> keras.optimizers.Optimizer:
    """The Keras optimizer of that name, in any case; scales the loss where float16 would underflow.

    Raises:
        ValueError: Keras has none of that name, or it has no such argument.
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
    """The names of what the configuration says of the optimizer."""
    return [
        name for name in fields_with(Role.OPTIMIZER)
        if getattr(config, name) != getattr(TrainConfig, name)
    ]


def with_given(
    optimizer: keras.optimizers.Optimizer, config: TrainConfig, length: Length
) -> keras.optimizers.Optimizer:
    """A compiled model's optimizer, with what the configuration says in place of its own.

    One whose learning rate alone changes keeps what it has counted and averaged; with more it
    begins anew.

    Raises:
        ValueError: it has no such argument, or its own schedule leaves open what is asked for.
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
    """The learning rate as it is now; where the run has a warm-up, the one at its end."""
    rate = optimizer.get_config()["learning_rate"] if config.warmup_steps else None
    if not isinstance(rate, dict):
        return float(optimizer.learning_rate)
    return float(keras.optimizers.schedules.deserialize(rate)(config.warmup_steps))


def _arguments(config: TrainConfig, kind: type, length: Length) -> dict[str, Any]:
    """The arguments that the configuration gives a class of Keras' optimizers.

    The step calls the optimizer once, with the averaged gradients: `global_clipnorm` limits their
    norm.

    Raises:
        ValueError: the class has no such argument.
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
