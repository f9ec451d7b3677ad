"""Estimates the memory of each device from the traced step, for --plan and num_towers=auto.

parameters, slots      by their shapes
gradients, activations the operations of a tower with r rows, in the order of their phases: the
                       most bytes of values that later operations read
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import keras
import tensorflow as tf
from rich import filesize

from towers.app.datasets.dataset import usable_memory
from towers.divide.facts import PART, Value, rows as rows_at
from towers.divide.phases import Phases
from towers.divide.tower_step import TowerStep
from towers.machine import nvidia
from towers.machine.devices import is_gpu, place_towers, short_name
from towers.machine.words import aligned
from towers.step.sharding import shard_sizes

# Their result is, or lies in, the memory of their first input.
_VIEWS = {"Identity", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"}
# They write over an input of the same size that nothing reads later.
_IN_PLACE = {
    *(
        "Add",
        "AddV2",
        "AddN",
        "Sub",
        "Mul",
        "RealDiv",
        "Neg",
        "Exp",
        "Maximum",
        "Minimum",
        "BiasAdd",
    ),
    *("Relu", "ReluGrad", "Relu6", "Relu6Grad", "Sigmoid", "SigmoidGrad", "Tanh", "TanhGrad"),
    *("Erf", "Square", "SquaredDifference", "Rsqrt", "Softmax", "Select", "SelectV2"),
}
_ROOM = 0.9  # of a device's memory: libraries and scratch space of kernels take the rest


class Stage(NamedTuple):
    """Holds bytes of a tower between two meetings, without its gradients."""

    most: float  # at any time of the stage
    kept: float  # before the stage or after it, while other towers of the device have their turn


@dataclass
class TowerMemory:
    """Holds the bytes of one tower: gradients, its shard of a batch, and all else, by stage."""

    rows: int
    gradients: int
    shard: int
    stages: Sequence[Stage]

    def activations(self, num_towers: int = 1, at_once: int = 1) -> int:
        """Returns the most bytes on a device of which `at_once` towers compute at a time."""
        waiting = num_towers - at_once
        return int(max(at_once * stage.most + waiting * stage.kept for stage in self.stages))

    def with_rows(self, rows: int) -> "TowerMemory":
        """Returns the memory of a tower with another number of rows."""
        scale = rows / self.rows
        stages = [Stage(most * scale, kept * scale) for most, kept in self.stages]
        return TowerMemory(rows, self.gradients, int(self.shard * scale), stages)


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


def tower_memory(phases: Phases, rows: int) -> TowerMemory:
    """Returns the bytes of a tower with so many rows in the update with these phases.

    A loop counts with its results alone, and kernels need further space while they run.
    """
    towers = {op for phase, ops in phases.items() if phase % 2 == 0 for op in ops}
    order = [op for _, ops in sorted(phases.items()) for op in ops]
    buffer: dict[Value, Value] = {}
    sizes: dict[Value, int] = {}
    for op in order:
        for value in op.outputs:
            sizes[value] = _num_bytes(value, rows, sizes)
            source = op.inputs[0] if op.type in _VIEWS and op in towers else value
            buffer[value] = buffer.get(source, source)
    last: dict[Value, int] = {}
    for i, op in enumerate(order):
        for value in (*op.inputs, *op.outputs):
            last[buffer.get(value, value)] = i
    ends: dict[int, list[Value]] = defaultdict(list)
    for value, i in last.items():
        if value.op in towers:
            ends[i].append(value)
    final = max(phases)
    # Parts of sums that are read at the end wait for the update: the gradients.
    read = {buffer.get(value, value) for op in phases[final] for value in op.inputs}
    gradients = {value for value in read if value.op in towers and value.fact == PART}
    given = {v for op in towers for v in op.inputs if v.op.type == "Placeholder"}
    shard = sum(_num_bytes(value, rows, {}) for value in given if value.fact == rows_at(0))
    stages, size, position = [], 0, 0
    for phase, ops in sorted(phases.items()):
        before = most = size
        for i, op in enumerate(ops, position):
            ended = [value for value in ends[i] if value not in gradients]
            made = 0
            if op in towers:
                own = [value for value in op.outputs if buffer[value] is value]
                made = sum(sizes[v] for v in own if v not in gradients)
            size += made
            reused = op.type in _IN_PLACE and any(
                value in [buffer.get(v, v) for v in op.inputs] and sizes[value] == made
                for value in ended
            )
            most = max(most, size - (made if reused else 0))
            size -= sum(sizes[value] for value in ended)
        position += len(ops)
        if phase % 2 == 0:
            stages.append(Stage(most, max(before, size)))
    return TowerMemory(rows, sum(sizes[v] for v in gradients), shard, stages)


def _num_bytes(value: Value, rows: int, sizes: Mapping[Value, int]) -> int:
    """Returns the bytes of a value of a tower with so many rows; sizes: of the values before it."""
    if value.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    shape = value.shape.as_list() if value.shape.rank is not None else [None, None]
    if shape.count(None) > 1:  # such as a sum over axes that follow from shapes
        return max((sizes.get(given, 0) for given in value.op.inputs), default=0)
    each = rows * (value.rows_each or 1)
    return int(value.dtype.size * math.prod(each if n is None else n for n in shape))


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
        if memory.limit is not None:
            left = _ROOM * memory.limit - (memory.total - memory.activations)
            memory.most_rows = max(0, int(left * tower.rows / max(memory.activations, 1)))
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
