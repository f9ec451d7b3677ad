"""Reads what single towers contributed to a step: is it finite, and how large are its gradients?"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.divide.parts import Gradient, Parts, as_slices, tower_gradients
from towers.step.averaging import Values
from towers.step.errors import NonFiniteError, are_finite, nonfinite_error
from towers.step.exchange import Exchange
from towers.step.noise_scale import NoiseMetric, squared_norm


def towers_finite(
    loss: tf.Tensor, gradients: Sequence[Gradient], loss_parts: Parts | None, parts: Sequence[Any],
    devices: Sequence[str],
) -> list[tf.Tensor]:  # fmt: skip
    """Returns [1 + V] bool of each tower: whether its part of loss and gradients is finite.

    A worker's first tower stands for a value that was computed once. gradients: from
    `plain_gradients`, with their parts. devices: the device of each of this worker's towers.
    """
    losses = [loss, *[tf.zeros_like(loss)] * (len(devices) - 1)]
    if loss_parts is not None:
        losses = loss_parts.values
    divided = [tower_gradients(*pair) for pair in zip(gradients, parts, strict=True)]
    finite = []
    for t, device in enumerate(devices):
        own: Values = []
        for each, gradient in zip(divided, as_slices(gradients), strict=True):
            whole = gradient if t == 0 else None
            own.append(whole if each is None else each[t])
        with tf.device(device):
            finite.append(are_finite(losses[t], own))
    return finite


def error_of(
    finite: np.ndarray,
    towers: np.ndarray,
    devices: Sequence[str],
    variables: Sequence[keras.Variable],
) -> NonFiniteError:
    """Returns the error of an update that was left out.

    finite: [1 + V] bool, for the whole batch. towers: [T, 1 + V] bool, from `towers_finite`.
    variables: the V trainable variables.
    """
    if not towers.all():
        return nonfinite_error(towers, devices, variables)
    index = int(np.argwhere(~finite)[0, 0])  # a sum of finite parts, or noise by tf.random
    what = f"the gradient of {variables[index - 1].path}" if index else "the loss"
    return NonFiniteError(f"{what} is NaN or infinite.")


def measure_noise(
    metric: NoiseMetric, exchange: Exchange, gradients: Sequence[Gradient], parts: Sequence[Any],
    sizes: tf.Tensor, loss_scale: tf.Tensor,
) -> None:  # fmt: skip
    """Updates the noise scale with the gradients that towers have parts of.

    gradients: from `plain_gradients`, with their parts. sizes: [T] numbers of rows.

    Raises ValueError if there are none.
    """
    divided = [tower_gradients(*pair) for pair in zip(gradients, parts, strict=True)]
    pairs = zip(divided, as_slices(gradients), strict=True)
    kept = [(tower_parts, gradient) for tower_parts, gradient in pairs if tower_parts is not None]
    if not kept:
        raise ValueError(
            "noise_scale: all gradients were computed once, from the rows of all towers, so no "
            "tower has a part of them. Leave noise_scale out."
        )
    num_local = len(kept[0][0])
    norms = [squared_norm([tower_parts[t] for tower_parts, _ in kept]) for t in range(num_local)]
    whole = squared_norm([gradient for _, gradient in kept])
    norms = exchange.all_gather(norms)
    metric.update_state(tf.stack(norms) / loss_scale**2, sizes, whole / loss_scale**2)
