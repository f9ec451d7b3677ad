"""The trip over the CPU that each step makes: parameters down to every GPU, gradients up again."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import towers
from benchmarks.clocks import synchronized_time

_WARM_UP_CALLS = 3


def measure_trip(step: towers.TowerStep, seconds: float) -> dict[str, Any]:
    """The bytes and the milliseconds of each way, without any computation between them.

    A step may hide a part of it behind a tower's computation; this is the whole of it, with the
    call that starts it.

    Args:
        step: towers whose parameters are on the CPU.
        seconds: to measure each way.

    Returns:
        {"down_mb", "up_mb", "down_ms", "up_ms", "down_gb_per_second", "up_gb_per_second"} of one
        step, all devices together; megabytes of 10**6 bytes.
    """
    others = [device for device in step.devices if device != step.parameter_device]
    count = len(others) * sum(v.value.dtype.size * v.value.shape.num_elements()
                              for v in step.model.variables)
    result: dict[str, Any] = {}
    for way, move in (("down", parameters_down(step)), ("up", gradients_up(step))):
        each = seconds_each(move, seconds)
        result |= {
            f"{way}_mb": count / 1e6, f"{way}_ms": 1e3 * each,
            f"{way}_gb_per_second": count / each / 1e9,
        }
    return result


def parameters_down(step: towers.TowerStep) -> Callable[[], Any]:
    """() -> every variable of the model, on each device that runs towers."""

    @tf.function(autograph=False)
    def down() -> list:
        with tf.device(step.parameter_device):
            values = [tf.convert_to_tensor(v.value) for v in step.model.variables]
        return [_on(device, values) for device in step.devices]

    return down


def gradients_up(step: towers.TowerStep) -> Callable[[], Any]:
    """() -> from each device a tensor of every variable's shape, where the parameters are.

    Of every variable's: BatchNormalization's statistics come up with the gradients.
    """
    gradients = []
    for device in step.devices:
        with tf.device(device):
            gradients.append([tf.ones(v.shape, v.dtype) for v in step.model.variables])

    @tf.function(autograph=False)
    def up(values: list) -> list:
        return [_on(step.parameter_device, of_device) for of_device in values]

    return lambda: up(gradients)


def seconds_each(function: Callable[[], Any], seconds: float) -> float:
    """The mean seconds of a call until its last copy has arrived."""
    for _ in range(_WARM_UP_CALLS):
        function()
    begin = now = synchronized_time()
    count = 0
    while now - begin < seconds:
        function()
        now = synchronized_time()
        count += 1
    return (now - begin) / count


def _on(device: str, values: list) -> list:
    with tf.device(device):
        return [tf.identity(value) for value in values]
