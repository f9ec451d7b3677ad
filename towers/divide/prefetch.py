"""Copies the shards of the next global batch to their devices while the current step runs.

main thread:    [ step 1 ................... ] [ step 2 ................... ] ...
second thread:  [ batch 2: split, to all devices at once ] [ batch 3: ... ] ...
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import tensorflow as tf

from towers.divide.machines import Machine
from towers.divide.tower_step import TowerStep
from towers.machine import hang
from towers.machine.devices import HOST
from towers.step.checks import check_rows
from towers.step.sharding import Placed, shard_batch
from towers.step.structures import (
    Structure,
    any_rows,
    as_tensor,
    components,
    is_composite,
    map_tensors,
    packed,
)


_Element = TypeVar("_Element")  # a global batch

# A global batch, and its shards on their devices or None: arguments of `TowerStep.train_batch`.
Batch = namedtuple("Batch", ["x", "y", "placed"])
WeightedBatch = namedtuple("WeightedBatch", ["x", "y", "sample_weight", "placed"])


def place(machine: Machine, batch: Structure) -> list[Structure]:
    """Copies the shards of this worker's towers to their devices, concurrently; returns them."""
    with tf.device(HOST):
        tensors = map_tensors(as_tensor, batch)
    check_rows(*tensors if isinstance(tensors, tuple) else [tensors])
    specs = map_tensors(any_rows, tensors)
    exchange, stages = machine.exchange, machine.stages
    devices = dict(zip(exchange.local_towers, machine.devices, strict=True))
    how = specs, exchange.num_towers, devices, stages.groups if stages else {}
    if str(how) not in _placing:
        # Outside of a graph TensorFlow's copies block, one after another. A tf.function would copy
        # its results back to the CPU, because it adds an operation without a device to each.
        place_all = functools.partial(_place_all, *how)
        _placing[str(how)] = tf.compat.v1.wrap_function(place_all, components(specs))
    placed = iter(_placing[str(how)](*components(tensors)))
    return [packed(specs, placed) for _ in devices]


_placing: dict[str, Callable] = {}  # by structure and devices, shared by all steps


def _place_all(
    specs: Structure,
    num_towers: int,
    devices: Mapping[int, str],
    groups: Mapping[str, Sequence[str]],
    *tensors: tf.Tensor,
) -> list[tf.Tensor]:
    """Maps a batch's tensors to the tensors of all shards, on their devices, in a graph."""
    with tf.device(HOST):
        shards = shard_batch(packed(specs, iter(tensors)), num_towers)
    placed: list[tf.Tensor] = []
    for tower, device in devices.items():
        values = shards[tower].values
        x, *others = values if isinstance(values, tuple) else (values,)
        for part, place in ((x, device), (others, groups.get(device, [device])[-1])):
            for value in tf.nest.flatten(part):
                with tf.device(HOST if is_composite(value) else place):
                    placed += map(tf.identity, components(value))
    return placed


def prefetched(
    step: TowerStep, batches: Iterable[Structure], *, to_devices: bool | None = None
) -> Iterator[Any]:
    """Yields each batch with its shards copied to their devices while the step before it runs.

    Results do not change. Each device needs memory for one more shard of each of its towers.

    Args:
        step: the `TowerStep` that trains on the batches.
        batches: an iterable of x, (x, y) or (x, y, sample_weight).
        to_devices: whether to copy the shards ahead. Default: the policy of the step's devices.

    Returns:
        An iterator of named tuples, (x, y, placed) or (x, y, sample_weight, placed). The fields
        are arguments of `TowerStep.train_batch`.
    """
    if to_devices is None:
        to_devices = step.policy.prefetch_to_devices
    unpacked = map(keras.utils.unpack_x_y_sample_weight, batches)
    for (x, y, sample_weight), placed in placed_ahead(
        step.machine if to_devices else None, unpacked
    ):
        if sample_weight is None:
            yield Batch(x, y, placed)
        else:
            yield WeightedBatch(x, y, sample_weight, placed)


def placed_ahead(
    machine: Machine | None, elements: Iterable[_Element]
) -> Iterator[tuple[_Element, Placed]]:
    """Yields (element, its shards on their devices); the next one is placed at the same time.

    machine: None yields (element, None).
    """
    if machine is None:
        yield from ((element, None) for element in _reading(iter(elements)))
        return
    iterator = map(lambda element: (element, place(machine, element)), elements)
    with ThreadPoolExecutor(1) as thread:
        ahead = thread.submit(next, iterator, None)
        for pair in _reading(iter(lambda: ahead.result(), None)):
            ahead = thread.submit(next, iterator, None)
            yield pair


def _reading(batches: Iterator[_Element]) -> Iterator[_Element]:
    """Yields each batch; marks the wait for it as reading, for the check for hanging runs."""
    while True:
        with hang.within("reading data"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch
