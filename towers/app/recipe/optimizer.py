"""Makes the Keras optimizer and the learning-rate schedule that a configuration names.

rate  |      ____                 constant, with a warm-up of W updates
      |     /    `-._             linear, cosine: to 0 at the run's last update
      |    /         `-._
      |   /              `-._
      |__/___________________`.
         0  W                 updates
"""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer, schedules
from keras.optimizers.schedules import LearningRateSchedule

from towers.app.config import TrainConfig, fields_with
from towers.app.fields import Role
from towers.app.training_fields import step_epochs

_STEP_FACTOR = 0.1  # source: He et al. 2016, Goyal et al. 2017


@keras.saving.register_keras_serializable(package="towers")
class WarmUp(LearningRateSchedule):
    """Gives rate * step / warmup_steps, and from step warmup_steps on the rate of `after`.

    after: a schedule, or its configuration, with steps from the run's start. Keras' CosineDecay
    with an initial rate of 0 has the same warm-up.
    """

    def __init__(
        self, rate: float, warmup_steps: int, after: LearningRateSchedule | dict[str, object]
    ) -> None:
        if isinstance(after, dict):
            after = schedules.deserialize(after)
        self.rate, self.warmup_steps, self.after = rate, warmup_steps, after

    def __call__(self, step: int | tf.Tensor) -> tf.Tensor:
        """Returns the learning rate of update `step`, counted from 0."""
        after = tf.convert_to_tensor(self.after(step))
        part = tf.cast(step, after.dtype) / self.warmup_steps
        return tf.where(part < 1, tf.cast(self.rate, after.dtype) * part, after)

    def get_config(self) -> dict[str, object]:
        """Returns the arguments of `__init__`, with `after` serialized by Keras."""
        after = schedules.serialize(self.after)
        return {"rate": self.rate, "warmup_steps": self.warmup_steps, "after": after}


def make_schedule(
    config: TrainConfig, rate: float, steps_an_epoch: int
) -> float | LearningRateSchedule:
    """Returns the learning rate of a run, at most `rate`: a number if it is constant.

    Raises ValueError if the warm-up is not shorter than the run.
    """
    warm = config.warmup_steps
    steps = max(1, config.num_steps(steps_an_epoch))
    if warm >= steps:
        raise ValueError(
            f"warmup_steps ({warm}) must be fewer than the run's updates: "
            f"{config.num_steps(steps_an_epoch):,}, {steps_an_epoch:,} an epoch."
        )
    if not warm and config.schedule == "constant":
        return rate
    if not warm and config.schedule == "cosine":
        return schedules.CosineDecay(rate, steps)
    if config.schedule in ("constant", "cosine"):
        alpha = float(config.schedule == "constant")  # with 1.0, the cosine stays at `rate`
        return schedules.CosineDecay(
            0.0, steps - warm, alpha, warmup_target=rate, warmup_steps=warm
        )
    after: LearningRateSchedule
    if config.schedule == "linear":  # passes `rate` at the warm-up's end, 0 at the run's end
        after = schedules.PolynomialDecay(rate * steps / (steps - warm), steps, 0.0)
    else:
        epochs = step_epochs(config.schedule)
        # Keras' boundaries are the last steps, counted from 0, that have the earlier rate.
        boundaries = [epoch * steps_an_epoch - 1 for epoch in epochs]
        rates = [rate * _STEP_FACTOR**n for n in range(len(epochs) + 1)]
        after = schedules.PiecewiseConstantDecay(boundaries, rates)
    if warm:
        return WarmUp(rate, warm, after)
    return after


def schedule_notes(config: TrainConfig, steps_an_epoch: int) -> list[str]:
    """Returns a note that describes the learning rate's warm-up and schedule."""
    texts = []
    if config.warmup_steps:
        texts.append(f"from 0 up over {config.warmup_steps:,} updates")
    if epochs := step_epochs(config.schedule):
        texts.append(f"a tenth after epoch {', '.join(map(str, epochs))}")
    elif config.schedule != "constant":
        texts.append(f"{config.schedule} to 0 at update {config.num_steps(steps_an_epoch):,}")
    return [f"learning rate: {', then '.join(texts)}"]


@contextmanager
def plain_schedule(optimizer: Optimizer | None) -> Iterator[None]:
    """Leaves out an optimizer's `WarmUp` within the context, so that its file needs no towers."""
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    config = inner and inner.get_config().get("learning_rate")
    if not isinstance(config, dict) or config.get("registered_name") != "towers>WarmUp":
        yield
        return
    warm_up = schedules.deserialize(config)
    inner.learning_rate = warm_up.after
    try:
        yield
    finally:
        inner.learning_rate = warm_up


def make_optimizer(config: TrainConfig, name: str, steps_an_epoch: int) -> Optimizer:
    """Makes the Keras optimizer with this name, in any case; with mixed_float16, it scales losses.

    Raises ValueError if Keras has none, or if the optimizer lacks a configured argument.
    """
    not_alone = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
    classes = {}
    for key, value in inspect.getmembers(keras.optimizers, inspect.isclass):
        if issubclass(value, Optimizer) and key not in not_alone:
            classes[key.lower()] = value
    kind = classes.get(name.lower())
    if kind is None:
        raise ValueError(f"optimizer ({name!r}) must be one of {', '.join(sorted(classes))}.")
    optimizer = kind(**_arguments(config, kind, steps_an_epoch))
    if config.precision == "mixed_float16":
        return LossScaleOptimizer(optimizer)
    return optimizer


def given(config: TrainConfig) -> list[str]:
    """Returns the names of the configuration's optimizer fields that are not at their defaults."""
    names = fields_with(Role.OPTIMIZER)
    return [name for name in names if getattr(config, name) != getattr(TrainConfig, name)]


def override_optimizer(optimizer: Optimizer, config: TrainConfig, steps_an_epoch: int) -> Optimizer:
    """Returns a compiled model's optimizer with the configured arguments, or its replacement.

    The optimizer keeps its state if at most the learning rate changes; else a new one is made.
    Raises ValueError if it lacks an argument, or has a schedule that the fields leave as is.
    """
    names = given(config)
    if config.optimizer is not None:
        return make_optimizer(config, config.optimizer, steps_an_epoch)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if names == ["learning_rate"] or config.has_schedule and "learning_rate" not in names:
        _check_constant_rate(inner, config)
        if "learning_rate" not in names:
            config = dataclasses.replace(config, learning_rate=float(inner.learning_rate))
    if names == ["learning_rate"]:
        inner.learning_rate = config.learning_rate
    elif names:
        arguments = _arguments(config, type(inner), steps_an_epoch)
        changed = type(inner).from_config({**inner.get_config(), **arguments})
        if inner is optimizer:
            return changed
        return LossScaleOptimizer(changed)
    return optimizer


def shown_rate(optimizer: Optimizer, config: TrainConfig) -> float:
    """Returns the current learning rate, or with a warm-up, the rate at the warm-up's end."""
    if config.warmup_steps:
        rate = optimizer.get_config()["learning_rate"]
        if isinstance(rate, dict):
            return float(schedules.deserialize(rate)(config.warmup_steps))
    return float(optimizer.learning_rate)


def _check_constant_rate(optimizer: Optimizer, config: TrainConfig) -> None:
    """Raises ValueError if a model's own optimizer follows a schedule."""
    if isinstance(optimizer.get_config()["learning_rate"], dict):
        raise ValueError(
            f"learning_rate ({config.learning_rate}) and schedule ({config.schedule}) have no "
            "effect: the model's own optimizer follows a schedule. Leave them out, or give "
            "`optimizer` as well."
        )


def _arguments(config: TrainConfig, kind: type, steps_an_epoch: int) -> dict[str, Any]:
    """Returns the configured arguments for a class of Keras' optimizers; raises ValueError.

    `global_clipnorm` limits the averaged gradients' norm, because the step passes only these.
    """
    parameters = inspect.signature(kind).parameters
    arguments = {
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "global_clipnorm": config.clip_norm,
        "ema_momentum": config.ema,
    }
    if config.ema is not None:
        arguments["use_ema"] = True
    if config.learning_rate is not None or config.has_schedule:
        rate = config.learning_rate
        if rate is None:
            rate = float(parameters["learning_rate"].default)
        arguments["learning_rate"] = make_schedule(config, rate, steps_an_epoch)
    if config.momentum is not None and "momentum" not in parameters:
        raise ValueError(
            f"momentum ({config.momentum}): {kind.__name__.lower()} has none. Use optimizer=sgd."
        )
    return {name: value for name, value in arguments.items() if value is not None}
