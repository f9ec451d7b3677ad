"""Estimates the memory of each device from the traced step, for --plan and num_towers=auto.

parameters, slots      by their shapes
gradients, activations by the operations of a tower with r rows, see `liveness`
"""

import math
from dataclasses import dataclass

import keras
import tensorflow as tf
from rich import filesize

from towers.app.datasets.dataset import usable_memory
from towers.app.diagnosis.liveness import TowerMemory, tower_memory
from towers.divide.tower_step import TowerStep
from towers.machine import nvidia
from towers.machine.devices import is_gpu, place_towers, short_name
from towers.machine.words import aligned
from towers.step.sharding import shard_sizes

_ROOM = 0.9  # of a device's memory: libraries and scratch space of kernels take the rest


@dataclass
class DeviceMemory:
    """Holds the estimated bytes on one device; limit: of the device, None if it is unknown."""

    parameters: int
    slots: int
    gradients: int
    activations: int
    limit: int | None
    most_rows: int | None  # that a tower could have

    @property
    def total(self) -> int:
        """Returns the bytes of all kinds."""
        return self.parameters + self.slots + self.gradients + self.activations

    def rows_that_fit(self, rows: int) -> int | None:
        """Returns the most rows a tower could have, if the estimate is for so many rows each."""
        if self.limit is None:
            return None
        left = _ROOM * self.limit - (self.total - self.activations)
        return max(0, int(left * rows / max(self.activations, 1)))


def device_memory(
    step: TowerStep, batch_size: int, num_towers: int | None = None
) -> dict[str, DeviceMemory]:
    """Returns the memory of each device in one step; call it after an update has been traced.

    num_towers: another number than the step's, on the same devices.
    """
    rows = max(shard_sizes(batch_size, num_towers or step.num_towers))
    return of_towers(step, tower_memory(step.phases(), rows), num_towers)


def of_towers(
    step: TowerStep, tower: TowerMemory, num_towers: int | None = None
) -> dict[str, DeviceMemory]:
    """Returns the memory of each device with such towers."""
    devices = step.tower_devices
    if num_towers is not None:
        devices = place_towers(num_towers, list(dict.fromkeys(devices)))
    parameters = sum(_size_of(v) for v in step.model.variables)
    slots = sum(_size_of(v) for v in step.optimizer.variables)
    home, found = short_name(step.parameter_device), {}
    for device in dict.fromkeys(devices):
        count = devices.count(device)
        at_once = 1 if step.policy.take_turns else count
        has_all = step.strategy.num_copies > 0 or device == home
        # A balanced tree of additions waits for one sum at each of its levels.
        sums = count.bit_length() if at_once == 1 else count
        memory = DeviceMemory(
            parameters=parameters,
            slots=slots if has_all else 0,
            gradients=tower.gradients * sums,
            # The shards of the next batch come during the step.
            activations=tower.activations(count, at_once) + 2 * count * tower.shard,
            limit=memory_limit(device),
            most_rows=None,
        )
        memory.most_rows = memory.rows_that_fit(tower.rows)
        found[device] = memory
    return found


def _size_of(variable: keras.Variable) -> int:
    return int(tf.as_dtype(variable.dtype).size * math.prod(variable.shape))


def memory_limit(device: str) -> int | None:
    """Returns the bytes of a device, or None if the driver does not tell them.

    CPU devices share the memory of this machine.
    """
    if not is_gpu(device):
        count = len(tf.config.list_logical_devices("CPU"))
        return usable_memory() // count
    found: list[int | None] = []
    known = {gpu.number: gpu.memory for gpu in nvidia.driver_gpus() or []}
    for gpu in tf.config.list_physical_devices("GPU"):
        parts = tf.config.get_logical_device_configuration(gpu)
        whole = known.get(int(gpu.name.rpartition(":")[2]))
        found += [part.memory_limit for part in parts] if parts else [whole]
    mib = found[int(device.rpartition(":")[2])]
    return None if mib is None else int(mib) * 2**20


def memory_table(found: dict[str, DeviceMemory]) -> list[str]:
    """Returns the memory of each device as lines of aligned columns."""
    names = ["parameters", "slots", "gradients", "activations", "sum", "memory", "rows at most"]
    cells = [["device", *names]]
    for device, row in found.items():
        sizes = [row.parameters, row.slots, row.gradients, row.activations, row.total, row.limit]
        shown = ["-" if not size else filesize.decimal(size) for size in sizes]
        rows = "-" if row.most_rows is None else f"{row.most_rows:,}"
        cells.append([device, *shown, rows])
    return aligned(cells)
