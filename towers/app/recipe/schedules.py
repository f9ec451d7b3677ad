"""Learning-rate schedules by name: Keras' own objects, and a warm-up before those without one.

    rate  |      ____                 constant, with a warm-up of W updates
          |     /    `-._             linear, cosine: to 0 at the run's last update
          |    /         `-._
          |   /              `-._
          |__/___________________`.
             0  W                 updates
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from towers.app.config import TrainConfig, step_epochs

_STEP_FACTOR = 0.1  # of Goyal et al. 2017, and of He et al. 2016 before
_PACKAGE = "towers"


class Length(NamedTuple):
    """The length of a run.

    num_steps: updates of the whole run, the limit of max_steps included.
    steps_an_epoch: the last one may be a partial batch.
    """

    num_steps: int
    steps_an_epoch: int


@keras.saving.register_keras_serializable(package=_PACKAGE)
class WarmUp(LearningRateSchedule):
    """rate * step / warmup_steps, and from step warmup_steps on what another schedule says.

    The same as the warm-up of Keras' CosineDecay from a rate of 0.
    """

    def __init__(self, rate: float, warmup_steps: int, after: LearningRateSchedule) -> None:
        """
        Args:
            rate: where the warm-up ends.
            warmup_steps: how many updates it takes.
            after: a schedule that counts from the run's first update, too.
        """
        self.rate, self.warmup_steps, self.after = rate, warmup_steps, after

    def __call__(self, step: Any) -> tf.Tensor:
        """The learning rate of update `step`, from 0."""
        after = tf.convert_to_tensor(self.after(step))
        part = tf.cast(step, after.dtype) / self.warmup_steps
        return tf.where(part < 1, tf.cast(self.rate, after.dtype) * part, after)

    def get_config(self) -> dict[str, Any]:
        """See `LearningRateSchedule.get_config`."""
        after = keras.optimizers.schedules.serialize(self.after)
        return {"rate": self.rate, "warmup_steps": self.warmup_steps, "after": after}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "WarmUp":
        """See `LearningRateSchedule.from_config`."""
        after = keras.optimizers.schedules.deserialize(config["after"])
        return cls(config["rate"], config["warmup_steps"], after)


def make_schedule(config: TrainConfig, rate: float, length: Length) -> float | LearningRateSchedule:
    """The learning rate of a run: a number where it stays the same.

    Args:
        config: its `schedule` and `warmup_steps`.
        rate: the largest learning rate.
        length: of the run; another `epochs` or `max_steps` stretches a cosine or a line.

    Raises:
        ValueError: the warm-up takes the whole run.
    """
    kind, warm, steps = config.schedule.partition(":")[0], config.warmup_steps, length.num_steps
    if warm >= max(1, steps):
        raise ValueError(
            f"warmup_steps ({warm}) must be fewer than the run's updates: {steps:,}, "
            f"{length.steps_an_epoch:,} an epoch."
        )
    schedules, steps = keras.optimizers.schedules, max(1, steps)
    if kind == "constant":  # a cosine that stays where it begins
        return _cosine(rate, steps, warm, alpha=1.0) if warm else rate
    if kind == "cosine":
        return _cosine(rate, steps, warm, alpha=0.0)
    after: LearningRateSchedule
    if kind == "linear":  # the line through `rate` at the end of the warm-up, and 0 at the end
        after = schedules.PolynomialDecay(rate * steps / (steps - warm), steps, 0.0)
    else:
        epochs = step_epochs(config.schedule)
        # Keras' boundaries are the last steps, from 0, at the rate before.
        boundaries = [epoch * length.steps_an_epoch - 1 for epoch in epochs]
        rates = [rate * _STEP_FACTOR**n for n in range(len(epochs) + 1)]
        after = schedules.PiecewiseConstantDecay(boundaries, rates)
    return WarmUp(rate, warm, after) if warm else after


def schedule_notes(config: TrainConfig, length: Length) -> list[str]:
    """Notes for the user on what becomes of the learning rate."""
    texts = []
    if config.warmup_steps:
        texts.append(f"from 0 up over {config.warmup_steps:,} updates")
    epochs = step_epochs(config.schedule)
    if epochs:
        texts.append(f"a tenth after epoch {', '.join(map(str, epochs))}")
    elif config.schedule != "constant":
        texts.append(f"{config.schedule} to 0 at update {length.num_steps:,}")
    return [f"learning rate: {', then '.join(texts)}"]


@contextmanager
def plain_schedule(optimizer: keras.optimizers.Optimizer | None) -> Iterator[None]:
    """Within, an optimizer has no object of towers' own: its file then loads without towers.

    What the file lacks is the warm-up, which is over before a model is of any use.
    """
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    config = {} if inner is None else inner.get_config().get("learning_rate")
    if not isinstance(config, dict) or config.get("registered_name") != f"{_PACKAGE}>WarmUp":
        yield
        return
    warm_up = keras.optimizers.schedules.deserialize(config)
    inner.learning_rate = warm_up.after
    try:
        yield
    finally:
        inner.learning_rate = warm_up


def _cosine(rate: float, steps: int, warm: int, alpha: float) -> LearningRateSchedule:
    """Keras' CosineDecay, from `rate` or from its warm-up on, to alpha * rate at the last step."""
    decay = keras.optimizers.schedules.CosineDecay
    if not warm:
        return decay(rate, steps, alpha)
    return decay(0.0, steps - warm, alpha, warmup_target=rate, warmup_steps=warm)
