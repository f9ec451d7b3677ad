"""What a step would move between the parameters' device and the towers' devices: bytes and sends.

    down, once a device: parameters, state; each tower's shard
    up: sums of gradients, to another tower's device or home; predictions; tower 0's state

Counted as on GPUs, also for logical CPU devices: these share one memory, in which nothing moves.
A send is one tensor, however large; small ones share one (`transfers`).
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
from towers.step.losses import SHARES_SPEC
from towers.step.sharding import shard_sizes
from towers.step.state import is_seed
from towers.step.state import statistics as statistics_of
from towers.step.structures import map_tensors
from towers.step.transfers import packages

_LOSS = tf.TensorSpec([], tf.float32)


class Traffic(NamedTuple):
    """Bytes that one step moves between the parameters' device and another, by what they are.

    towers: the first and the last tower on that device. examples: the shard sizes there.
    sends_in, sends_out: the number of tensors that they travel as.
    """

    device: str
    towers: tuple[int, int]
    examples: list[int]
    parameters: int
    inputs: int
    gradients: int
    predictions: int
    sends_in: int
    sends_out: int


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
    sums_out = _sums_out(step.tower_devices, step.home)
    statistics = statistics_of(model) if step.batch_norm == "average" else []
    summed = _specs([*model.trainable_variables, *statistics])
    known = set(map(id, statistics))
    kept = _specs([v for v in model.non_trainable_variables if id(v) not in known])
    example = [spec for spec in tf.nest.flatten((x, y)) if spec is not None]
    outputs = _outputs(model, x)
    rows = []
    for device in dict.fromkeys(step.tower_devices):
        towers = [t for t, other in enumerate(step.tower_devices) if other == device]
        examples = sum(sizes[t] for t in towers)
        from_home = step.home != device  # what the parameters' device need not send itself
        own = kept if from_home and towers[0] == 0 else []
        rows.append(
            Traffic(
                device,
                (towers[0], towers[-1]),
                [sizes[t] for t in towers],
                _num_bytes(_specs(model.variables)) if from_home else 0,
                examples * _num_bytes(example) if device != HOST else 0,
                sums_out[device] * _num_bytes(summed) + _num_bytes(own),
                examples * _num_bytes(outputs) if from_home else 0,
                _sends_in(step, towers, example) if from_home else 0,
                sums_out[device] * _num_sends(step, [_LOSS, *summed]) + _num_sends(step, own)
                + from_home * len(towers) * len(outputs),
            )
        )
    return rows


def table(rows: Sequence[Traffic], shares_memory: bool = False) -> list[str]:
    """The transfers as lines of aligned columns, "-" where nothing moves; and their sum.

    Args:
        rows: of each device.
        shares_memory: say that the transfers are those of as many GPUs: see `Policy`.
    """
    columns = "parameters in", "examples in", "gradients out", "predictions out"
    cells = [["device", "towers", "examples", *columns, "sends in", "sends out"]]
    for row in rows:
        low, high = min(row.examples), max(row.examples)
        each = f"{high:,}" if low == high else f"{low:,}-{high:,}"
        count = f"{len(row.examples)} x {each}" if len(row.examples) > 1 else each
        cells.append(
            [row.device, tower_range(*row.towers), count, *map(_moved, row[3:7]),
             *(f"{number:,}" for number in row[7:])]
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


def _sends_in(step: TowerStep, towers: Sequence[int], example: Sequence[tf.TensorSpec]) -> int:
    """The tensors that a device of these towers receives from home; one is the loss scale."""
    variables = step.model.variables
    shared = _num_sends(step, _specs([v for v in variables if not is_seed(v)]))
    seeds = _num_sends(step, _specs([v for v in variables if is_seed(v)]))  # each tower's own
    return shared + 1 + len(towers) * (seeds + len(example) + len(SHARES_SPEC))


def _example_spec(tensor: tf.Tensor) -> tf.TensorSpec:
    if not tensor.shape[1:].is_fully_defined():
        raise ValueError(
            f"plan and profile count the bytes of an example, and here these differ: the batches "
            f"are of shape {tensor.shape}."
        )
    return tf.TensorSpec(tensor.shape[1:], tensor.dtype)


def _outputs(model: keras.Model, x: Any) -> list[tf.TensorSpec]:
    """The specs of one example's outputs."""
    one = tf.nest.map_structure(lambda v: keras.KerasTensor((1, *v.shape), v.dtype.name), x)
    outputs: Any = model.compute_output_spec(one)
    return [tf.TensorSpec(v.shape, v.dtype) for v in tf.nest.flatten(outputs)]


def _specs(variables: Sequence[keras.Variable]) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(v.shape, v.dtype) for v in variables]


def _num_bytes(specs: Sequence[tf.TensorSpec]) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.size for spec in specs)


def _num_sends(step: TowerStep, specs: Sequence[tf.TensorSpec]) -> int:
    as_gpus_do = step.packs_transfers or step.policy.shares_memory
    return sum(1 for _ in packages(specs)) if as_gpus_do else len(specs)
