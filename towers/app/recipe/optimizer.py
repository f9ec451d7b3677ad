"""The optimizer of a configuration: Keras' own, by name, with the arguments that flags ask for."""

import dataclasses
import inspect
from typing import Any

import keras

from towers.app.config import TrainConfig, fields_with
from towers.app.fields import Role
from towers.app.recipe.schedules import Length, make_schedule

_NOT_ALONE = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")


def make_optimizer(config: TrainConfig, name: str, length: Length) -> keras.optimizers.Optimizer:
    """The Keras optimizer of that name; scales the loss where float16 would underflow.

    Args:
        config: the run's; `optimizer` in it is what was asked for, `name` what it becomes.
        name: such as "adam", in any case.
        length: of the run, for the schedule.

    Raises:
        ValueError: Keras has none of that name, or it has no such argument.
    """
    kind = optimizer_class(name)
    optimizer = kind(**optimizer_arguments(config, kind, length))
    if config.precision == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def given(config: TrainConfig) -> list[str]:
    """The names of what the configuration says of the optimizer."""
    default = TrainConfig()
    return [
        name for name in fields_with(Role.OPTIMIZER)
        if getattr(config, name) != getattr(default, name)
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
    if "optimizer" in names:
        return make_optimizer(config, config.optimizer or "", length)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if "learning_rate" not in names and config.has_schedule:
        config = dataclasses.replace(config, learning_rate=_own_rate(inner, config))
    if names == ["learning_rate"]:
        _own_rate(inner, config)
        inner.learning_rate = config.learning_rate
    elif names:
        arguments = optimizer_arguments(config, type(inner), length)
        changed = type(inner).from_config({**inner.get_config(), **arguments})
        return changed if inner is optimizer else keras.optimizers.LossScaleOptimizer(changed)
    return optimizer


def shown_rate(optimizer: keras.optimizers.Optimizer, config: TrainConfig) -> float:
    """The learning rate as it is now; where the run has a warm-up, the one at its end."""
    rate = optimizer.get_config()["learning_rate"] if config.warmup_steps else None
    if not isinstance(rate, dict):
        return float(optimizer.learning_rate)
    return float(keras.optimizers.schedules.deserialize(rate)(config.warmup_steps))


def _own_rate(optimizer: keras.optimizers.Optimizer, config: TrainConfig) -> float:
    """The learning rate that a model's own optimizer has.

    Raises:
        ValueError: it follows a schedule.
    """
    if isinstance(optimizer.get_config()["learning_rate"], dict):
        raise ValueError(
            f"learning_rate ({config.learning_rate}) and schedule ({config.schedule}) have no "
            "effect: the model's own optimizer follows a schedule. Leave them out, or give "
            "`optimizer` as well, which replaces both."
        )
    return float(optimizer.learning_rate)


def optimizer_class(name: str) -> type:
    """The class of that name, in any case; ValueError where Keras has none."""
    classes = {
        key.lower(): value
        for key, value in vars(keras.optimizers).items()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and key not in _NOT_ALONE
    }
    if name.lower() not in classes:
        raise ValueError(f"optimizer ({name!r}) must be one of {', '.join(sorted(classes))}.")
    return classes[name.lower()]


def learning_rate(config: TrainConfig, kind: type) -> float:
    """The largest one of a run: the configuration's, or else the optimizer's own default."""
    if config.learning_rate is not None:
        return config.learning_rate
    return float(inspect.signature(kind).parameters["learning_rate"].default)


def optimizer_arguments(config: TrainConfig, kind: type, length: Length) -> dict[str, Any]:
    """The arguments that the configuration gives a class of Keras' optimizers.

    The step calls the optimizer once, with the averaged gradients: it is their norm that
    `global_clipnorm` limits.

    Args:
        config: the run's.
        kind: the class.
        length: of the run.

    Raises:
        ValueError: the class has no such argument.
    """
    arguments: dict[str, Any] = {}
    if config.learning_rate is not None or config.has_schedule:
        arguments["learning_rate"] = make_schedule(config, learning_rate(config, kind), length)
    if config.momentum is not None:
        arguments["momentum"] = config.momentum
        if "momentum" not in inspect.signature(kind).parameters:
            raise ValueError(
                f"momentum ({config.momentum}): {kind.__name__.lower()} has none. Use "
                "optimizer=sgd or optimizer=rmsprop, or leave it out."
            )
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.clip_norm is not None:
        arguments["global_clipnorm"] = config.clip_norm
    if config.ema is not None:
        arguments.update(use_ema=True, ema_momentum=config.ema)
    return arguments
