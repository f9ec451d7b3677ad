"""Counts for --plan, from the graph, the bytes that a step moves, and describes its stages and layers.

parameter device     --- parameters, state, shards --->   towers' devices
                     <-- sums of gradients, state, predictions ---
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf
from rich import filesize

from towers.divide.tower_step import TowerStep
from towers.machine.devices import short_name, tower_range
from towers.machine.keras_internals import calls_in_order
from towers.machine.words import aligned
from towers.step import structures
from towers.step.sharding import shard_sizes
from towers.step.structures import BatchTensor, Structure, is_composite, map_tensors


@dataclass
class Traffic:
    """Counts the bytes that one step moves to and from a device, by kind."""

    towers: tuple[int, int]  # the first and the last one on that device
    examples: list[int]  # shard sizes
    parameters: int = 0  # parameters and state, in
    inputs: int = 0  # examples, in
    sums: int = 0  # sums of gradients, in, from other towers' devices
    results: int = 0  # sums, state and predictions, out
    sends_in: int = 0  # tensors that carry these bytes
    sends_out: int = 0


def traffic(step: TowerStep, batch_size: int, batch: Structure) -> dict[str, Traffic]:
    """Returns the transfers of one step for each device, from the specs of a batch [None, ...].

    Transfers with the parameter device count only at the other device, unless all have copies.
    """

    def full(part: BatchTensor) -> tf.TensorSpec:
        if is_composite(part) or not part.shape[1:].is_fully_defined():
            raise ValueError(
                "plan counts the bytes of an example, and here these differ: the batches are of "
                f"shape {part.shape}."
            )
        return tf.TensorSpec([batch_size, *part.shape[1:]], part.dtype)

    specs = [map_tensors(full, part) for part in keras.utils.unpack_x_y_sample_weight(batch)]
    rows: dict[str, Traffic] = {}
    sizes = shard_sizes(batch_size, step.num_towers)
    for tower, (device, size) in enumerate(zip(step.tower_devices, sizes, strict=True)):
        row = rows.setdefault(device, Traffic((tower, tower), []))
        row.towers = row.towers[0], tower
        row.examples.append(size)
    graph = step.graph_of_update(*specs)
    parameter_device = "" if step.strategy.num_copies else step.parameter_device
    for tensor, source, target in _transfers(graph):
        size = _num_bytes(tensor)
        if target in rows and (target != parameter_device or source not in rows):
            row, scope = rows[target], tensor.op.name.partition("/")[0]
            row.sends_in += 1
            if scope == structures.SPLIT:
                row.inputs += size
            elif source not in rows or source == parameter_device:
                row.parameters += size
            else:
                row.sums += size
        if source in rows and (source != parameter_device or target not in rows):
            rows[source].results += size
            rows[source].sends_out += 1
    return rows


def _transfers(graph: tf.Graph) -> list[tuple[tf.Tensor, str, str]]:
    """Returns (tensor, source, target), once for each tensor and each device that reads it."""
    variables = {given.name: variable.device for variable, given in graph.captures}

    def place(operation: tf.Operation) -> str:  # a variable's value is read where the variable is
        is_read = operation.type == "ReadVariableOp"
        return variables[operation.inputs[0].name] if is_read else operation.device

    found = {
        (tensor.name, short_name(place(tensor.op)), short_name(operation.device)): tensor
        for operation in graph.get_operations()
        for tensor in operation.inputs
        if tensor.dtype != tf.resource and operation.device and place(tensor.op)
    }
    return [(t, source, target) for (_, source, target), t in found.items() if source != target]


def table(rows: dict[str, Traffic]) -> list[str]:
    """Returns the transfers as lines of aligned columns ("-": nothing moves), and their sum."""
    cells = [
        [
            "device",
            "towers",
            "examples",
            "parameters in",
            "examples in",
            "sums in",
            "results out",
            "sends in",
            "sends out",
        ]
    ]
    for device, row in rows.items():
        times = f"{len(row.examples)} x " if len(row.examples) > 1 else ""
        cells.append(
            [
                device,
                tower_range(*row.towers),
                times + span(row.examples),
                *map(_size, (row.parameters, row.inputs, row.sums, row.results)),
                f"{row.sends_in:,}",
                f"{row.sends_out:,}",
            ]
        )
    down = filesize.decimal(sum(row.parameters + row.inputs + row.sums for row in rows.values()))
    up = filesize.decimal(sum(row.results for row in rows.values()))
    return [*aligned(cells), f"Each step moves {down} to the devices and {up} from them."]


def stage_table(step: TowerStep) -> list[str]:
    """Returns the stages of a step as lines of aligned columns.

    parameters      a device of the stage receives them each step, and sends their gradients
    towers at most  between their forward and backward passes in the stage, at the same time
    """
    assert step.stages is not None
    num_stages, variables = step.stages.num_stages, step.trainable_variables
    parameters = [0] * num_stages
    for variable, stage in zip(variables, step.stages.of(variables), strict=True):
        parameters[stage] += _num_bytes(variable.value)
    towers = max(step.tower_devices.count(first) for first in step.stages.groups)
    cells = [["stage", "on", "parameters", "towers at most", "layers"]]
    for stage, layers in enumerate(step.stages.names):
        cells.append(
            [
                str(stage),
                ", ".join(group[stage] for group in step.stages.groups.values()),
                filesize.decimal(parameters[stage]),
                str(min(towers, num_stages - stage) if step.policy.take_turns else towers),
                f"{layers[0]} ... {layers[-1]} ({len(layers)})" if len(layers) > 1 else layers[0],
            ]
        )
    return aligned(cells)


def layer_table(step: TowerStep, batch_size: int) -> list[str]:
    """Returns the layers of a tower as lines of aligned columns; [] if `call` is custom.

    largest output  the shape of the layer's outputs in the tower with the most rows
    variables       their bytes, at the layer's first call
    """
    calls = calls_in_order(step.model)
    if calls is None:
        return []
    rows, seen = max(shard_sizes(batch_size, step.num_towers)), set()
    groups = [[device] for device in dict.fromkeys(step.tower_devices)]
    if step.stages:
        groups = list(step.stages.groups.values())
    cells = [["layer", "device", "largest output", "bytes", "variables"]]
    for operation, outputs, _ in calls:
        stage = 0
        if step.stages:
            stage = [operation.name in names for names in step.stages.names].index(True)
        devices = [group[stage] for group in groups]
        if len(devices) > 3:
            devices = [f"{devices[0]} ... {devices[-1]}"]
        shapes = [(rows, *o.shape[1:]) if o.shape[:1] == (None,) else o.shape for o in outputs]
        specs = [tf.TensorSpec(s, o.dtype) for s, o in zip(shapes, outputs, strict=True)]
        variables = [] if operation in seen else getattr(operation, "variables", [])
        seen.add(operation)
        cells.append(
            [
                operation.name,
                ", ".join(devices),
                ", ".join(" x ".join(map(str, shape)) for shape in shapes),
                _size(sum(map(_num_bytes, specs))),
                _size(sum(_num_bytes(v.value) for v in variables)),
            ]
        )
    return aligned(cells)


def span(sizes: Sequence[int]) -> str:
    """Returns "16", or "12-13" if the sizes differ."""
    low, high = min(sizes), max(sizes)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _size(num_bytes: int) -> str:
    """Returns "4.8 MB", or "-" for nothing."""
    return filesize.decimal(num_bytes) if num_bytes else "-"


def _num_bytes(tensor: tf.Tensor) -> int:
    """Returns a tensor's bytes; an unknown axis counts as 1. A loop's list, of any size, has 0."""
    if tensor.dtype in (tf.resource, tf.variant):
        return 0
    return int(tensor.dtype.size * math.prod(n or 1 for n in tensor.shape or ()))
