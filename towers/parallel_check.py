"""What make_parallel asks of a model before it takes it."""

import functools
import warnings
from typing import Any

import keras
import tensorflow as tf

from towers.machine import devices as devices_lib
from towers.step import state as state_lib

_STEPS = ("train_step", "test_step", "predict_step")


def check_model(model: Any) -> None:
    """Raises ValueError for what is no model, or for one whose steps towers cannot run."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"model ({model!r}) must be a keras.Model.")
    for name in _STEPS:
        if name in vars(model):
            raise ValueError(
                f"model {model.name!r} has a {name} that was set on the instance: define it in a "
                f"class: class Own({model.__class__.__name__}): def {name}(self, data): ..."
            )
    if _is_distributed(model):
        raise ValueError(
            f"model {model.name!r} was made in the scope of a tf.distribute strategy, which "
            "divides batches itself. Make the model outside of it."
        )
    if model.built:
        state_lib.check_model(model)


@functools.cache
def hint_gpu_variables(home: str) -> None:
    """Warns of parameters on a GPU; once in a process."""
    if devices_lib.is_gpu(home):
        warnings.warn(
            f"the model's variables are on {home} and stay there: that device also averages and "
            "updates. Make the model under `with tf.device('/cpu:0'):` to have them on the CPU.",
            stacklevel=4,
        )


def _is_distributed(model: keras.Model) -> bool:
    """Whether a model was made in the scope of a tf.distribute strategy."""
    with tf.Graph().as_default():  # where nobody has entered a scope: the default is nobody's
        return model.distribute_strategy is not tf.distribute.get_strategy()
