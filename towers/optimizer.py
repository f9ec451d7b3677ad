"""The optimizer of a configuration: Keras' own, by name, with the arguments that flags ask for."""

import inspect
from typing import Any

import keras

from towers.config import TrainConfig
from towers.schedules import Length, make_schedule

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
    """What the configuration gives a class of Keras' optimizers; all else keeps its default.

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
