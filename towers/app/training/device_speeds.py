"""Gives faster devices more towers, by the measured seconds of one tower on each device.

/gpu:0   [tower 0][tower 1][tower 2]      a step ends with the slowest device
/gpu:1   [tower 3 .............. ]
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

from towers.app.config import TrainConfig
from towers.app.datasets.batches import Examples
from towers.app.training.failures import failures_explained
from towers.divide.tower_step import TowerStep
from towers.resume.epoch import Epoch
from towers.resume.random_state import random_state, set_random_state
from towers.workers.workers import join_workers

_ROUNDS = 3


def place_by_speed(
    config: TrainConfig,
    make_step: Callable[..., TowerStep],
    devices: Sequence[str],
    train: Examples,
    batch_size: int,
) -> tuple[TrainConfig, Mapping[str, float]]:
    """Returns the configuration with numbers for `towers_per_device`=auto, and the seconds.

    A single device, or group of `gpus_per_tower` devices, is not measured, and gets no number.
    Raises ValueError if there are several workers, or no more towers than devices.
    """
    num_groups = len(devices) // config.gpus_per_tower
    num_towers = config.num_towers_on(len(devices))
    if num_groups == 1:
        return dataclasses.replace(config, towers_per_device=None), {}
    if (num_workers := join_workers().num_workers) > 1:
        raise ValueError(
            f"towers_per_device=auto measures the devices of one worker, and there are "
            f"{num_workers}. Give each worker its numbers, such as towers_per_device=3,1."
        )
    if num_towers <= num_groups:
        raise ValueError(
            f"towers_per_device=auto gives faster devices more towers, and each of the {num_groups}"
            f" devices has only one. Set num_towers, such as num_towers={4 * num_groups}."
        )
    whole = dataclasses.replace(config, batch_size=batch_size, batch_size_per_gpu=None)
    random = random_state()  # the data may draw from it
    with failures_explained(whole, Path(os.devnull)):
        seconds = seconds_per_tower(make_step, devices, config, train, batch_size)
    set_random_state(random)
    counts = best_counts(num_towers, list(seconds.values()))
    text = ",".join(map(str, counts))
    return dataclasses.replace(config, towers_per_device=text), seconds


def seconds_per_tower(
    make_step: Callable[..., TowerStep],
    devices: Sequence[str],
    config: TrainConfig,
    train: Examples,
    batch_size: int,
) -> dict[str, float]:
    """Measures the gradients of one tower on each device, or on each group of `gpus_per_tower`.

    Changes no variable and no seed. Returns the seconds by the group's first device.
    """
    rows = math.ceil(batch_size / config.num_towers_on(len(devices)))
    batch = keras.utils.unpack_x_y_sample_weight(next(iter(train.batches(Epoch(rows)))))
    alone = {"num_towers": 1, "towers_per_device": None, "strategy": "parameter_server"}
    steps = {}
    for first in range(0, len(devices), config.gpus_per_tower):
        group = devices[first : first + config.gpus_per_tower]
        steps[group[0]] = make_step(devices=group, batch_size=rows, noise_scale=False, **alone)
    seconds = dict.fromkeys(steps, math.inf)
    for is_measured in (False, *[True] * _ROUNDS):  # the first round compiles
        for device, step in steps.items():  # in turns, so that load affects all
            began = time.perf_counter()
            step.gradients(*batch)
            tf.test.experimental.sync_devices()
            if is_measured:
                seconds[device] = min(seconds[device], time.perf_counter() - began)
    return seconds


def best_counts(num_towers: int, seconds: Sequence[float]) -> list[int]:
    """Returns how many towers each device gets, at least 1, so that the last one ends first.

    seconds: the time of one tower on each device. Towers are equal, so that giving each one to the
    device that would end first is optimal.
    """
    assert num_towers >= len(seconds), "each device has a tower"
    counts = [1] * len(seconds)
    for _ in range(num_towers - len(seconds)):
        ends = [(n + 1) * each for n, each in zip(counts, seconds, strict=True)]
        counts[ends.index(min(ends))] += 1
    return counts
