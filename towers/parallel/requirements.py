"""Checks that `make_parallel` can run a model, and explains errors of eager-only code."""

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from towers.machine import devices as devices_lib
from towers.machine.user_lines import line_of_error
from towers.step import checks


def check_model(model: Any) -> None:
    """Raises ValueError if `model` is not a keras.Model, or if towers cannot run its steps."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"model ({model!r}) must be a keras.Model.")
    for name in ("train_step", "test_step", "predict_step"):
        if name in vars(model):
            raise ValueError(
                f"model {model.name!r} has a {name} that was set on the instance: define it in a "
                f"class: class Own({model.__class__.__name__}): def {name}(self, data): ..."
            )
    with tf.Graph().as_default():  # a new graph has the default strategy
        is_distributed = model.distribute_strategy is not tf.distribute.get_strategy()
    if is_distributed:
        raise ValueError(
            f"model {model.name!r} was made in the scope of a tf.distribute strategy, which "
            "divides batches itself. Make the model outside of it."
        )
    if model.built:
        checks.check_model(model)


@functools.cache
def hint_gpu_variables(parameter_device: str) -> None:
    """Warns once per process that the model's variables are on a GPU."""
    if devices_lib.is_gpu(parameter_device):
        warnings.warn(
            f"the model's variables are on {parameter_device} and stay there: that device also "
            "averages and updates. Make the model under `with tf.device('/cpu:0'):` to have them "
            "on the CPU.",
            stacklevel=4,
        )


@contextmanager
def explained(name: str, wants_eager: bool) -> Iterator[None]:
    """Raises a ValueError that explains an error of code that only works with run_eagerly=True.

    `name` is the parallel model's; if it was not compiled with run_eagerly=True, errors stay.
    """
    try:
        yield
    except (TypeError, AttributeError, NotImplementedError) as error:
        if not wants_eager:
            raise
        said = str(error).strip().splitlines()[-1].strip().rstrip(".")
        raise ValueError(
            f"{line_of_error(error) or 'the step'}: {said}. run_eagerly=True has no effect on "
            f"parallel model {name!r}: towers are graphs, in which tensors have no values yet. "
            "Leave out .numpy(), float() and formatting, print by tf.print, or debug the model "
            "itself, on one device."
        ) from error
