"""The bytes that a step would move between the parameters' device and the towers' devices.

    down, once a device: parameters, state; each tower's shard
    up: sums of gradients, to another tower's device or home; predictions; tower 0's state

Counted as on GPUs, also for logical CPU devices: these share one memory, in which nothing moves.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.devices import HOST
from towers.reporting.formats import format_bytes
from towers.reporting.report import tower_range
from towers.step import TowerStep
from towers.step.averaging import Values, partial_sums
from towers.step.sharding import shard_sizes
from towers.step.state import statistics as statistics_of
from towers.step.structures import map_tensors


class Traffic(NamedTuple):
    """Bytes that one step moves between the parameters' device and another, by what they are.

    towers: the first and the last tower on that device. examples: the shard sizes there.
    """

    device: str
    towers: tuple[int, int]
    examples: list[int]
    parameters: int
    inputs: int
    gradients: int
    predictions: int


def one_example(batch: Any) -> tuple[Any, Any]:
    """The specs of one example's x and y; y is None where there is none.

    Args:
        batch: tensors [n, ...], or their specs: (x, y), x, or (x, y, sample_weight).

    Raises:
        ValueError: the examples are not all of one shape.
    """
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return map_tensors(_example_spec, x), map_tensors(_example_spec, y)


def traffic(step: TowerStep, batch_size: int, x: Any, y: Any) -> list[Traffic]:
    """The transfers of one step with a full global batch, for each device.

    The device that holds the parameters moves no parameters and no gradients, the CPU no examples:
    they are in its memory. Gradients count as dense, also those of
    embeddings.

    Args:
        step: the towers.
        batch_size: the global batch.
        x: the spec of one example's input, or a structure of specs.
        y: of its label, likewise; None where there is none.
    """
    model, sizes = step.model, shard_sizes(batch_size, step.num_towers)
    up = _bytes_up(step)
    specs = [spec for spec in tf.nest.flatten((x, y)) if spec is not None]
    example_bytes = sum(_num_bytes(spec.shape, spec.dtype) for spec in specs)
    prediction_bytes = _prediction_bytes(model, x)
    rows = []
    for device in dict.fromkeys(step.tower_devices):
        towers = [t for t, other in enumerate(step.tower_devices) if other == device]
        examples = sum(sizes[t] for t in towers)
        from_home = step.home != device  # what the parameters' device need not send itself
        rows.append(
            Traffic(
                device,
                (towers[0], towers[-1]),
                [sizes[t] for t in towers],
                _variable_bytes(model.variables) if from_home else 0,
                examples * example_bytes if device != HOST else 0,
                up[device],
                examples * prediction_bytes if from_home else 0,
            )
        )
    return rows


def table(rows: Sequence[Traffic], shares_memory: bool = False) -> list[str]:
    """The transfers as lines of aligned columns, "-" where nothing moves; and their sum.

    Args:
        rows: of each device.
        shares_memory: say that the transfers are those of as many GPUs: see `Policy`.
    """
    into, out = ("parameters in", "examples in"), ("gradients out", "predictions out")
    cells = [["device", "towers", "examples", *into, *out]]
    for row in rows:
        low, high = min(row.examples), max(row.examples)
        each = f"{high:,}" if low == high else f"{low:,}-{high:,}"
        count = f"{len(row.examples)} x {each}" if len(row.examples) > 1 else each
        cells.append(
            [row.device, tower_range(*row.towers), count, *map(_moved, row[3:])]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    down = format_bytes(sum(row.parameters + row.inputs for row in rows))
    up = format_bytes(sum(row.gradients + row.predictions for row in rows))
    lines.append(f"Each step moves {down} to the devices and {up} back.")
    if shares_memory:
        lines.append("Counted as on GPUs: logical CPU devices share one memory.")
    return lines


def _moved(count: int) -> str:
    return format_bytes(count) if count else "-"


def _bytes_up(step: TowerStep) -> dict[str, int]:
    """Sums of gradients and BatchNorm statistics, and tower 0's other state, by device."""
    model = step.model
    statistics = statistics_of(model) if step.batch_norm == "average" else []
    summed = _variable_bytes([*model.trainable_variables, *statistics])
    counts = {
        device: sums * summed for device, sums in _sums_out(step.tower_devices, step.home).items()
    }
    kept = _variable_bytes(model.non_trainable_variables) - _variable_bytes(statistics)
    if step.tower_devices[0] != step.home:
        counts[step.tower_devices[0]] += kept
    return counts


def _sums_out(tower_devices: Sequence[str], home: str) -> dict[str, int]:
    """The number of sums that leave each device, for another one or home.

    Adds nothing instead of gradients: the tree that a step of GPUs has.
    """
    counts = dict.fromkeys(tower_devices, 0)

    def move(sums: Values, source: str, target: str | None) -> Values:
        counts[source] += source != target
        return sums

    partial_sums([[]] * len(tower_devices), tower_devices, add_on_devices=True, home=home,
                 move=move)
    return counts


def _example_spec(tensor: tf.Tensor) -> tf.TensorSpec:
    if not tensor.shape[1:].is_fully_defined():
        raise ValueError(
            f"plan and profile count the bytes of an example, and here these differ: the batches "
            f"are of shape {tensor.shape}."
        )
    return tf.TensorSpec(tensor.shape[1:], tensor.dtype)


def _prediction_bytes(model: keras.Model, x: Any) -> int:
    """The bytes of one example's outputs."""
    one = tf.nest.map_structure(lambda v: keras.KerasTensor((1, *v.shape), v.dtype.name), x)
    outputs: Any = model.compute_output_spec(one)
    return sum(_num_bytes(v.shape, tf.as_dtype(v.dtype)) for v in tf.nest.flatten(outputs))


def _variable_bytes(variables: Sequence[keras.Variable]) -> int:
    return sum(_num_bytes(v.shape, tf.as_dtype(v.dtype)) for v in variables)


def _num_bytes(shape: Sequence[int], dtype: tf.DType) -> int:
    return math.prod(shape) * dtype.size
