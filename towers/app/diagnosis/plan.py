"""What a step would move between the parameters' device and the towers' devices: bytes and sends.

    down, once a device: parameters, state; each tower's shard
    up: sums of gradients, to another tower's device or home; predictions; tower 0's state
    where each device has a copy of the parameters, no parameters go down, and no sums up: slices
    of gradients go from each to the others, and come back as slices of the sum

Counted as on GPUs, also for logical CPU devices: these share one memory, in which nothing moves.
A send is one tensor, however large; small ones share one (`transfers`).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from towers.machine.devices import HOST, tower_range
from towers.app.reporting.formats import format_bytes
from towers.step import TowerStep
from towers.step.averaging import Values, partial_sums
from towers.step.exchange import make_plan, subtrees
from towers.step.losses import SHARES_SPEC
from towers.step.sharding import shard_sizes
from towers.step.state import is_seed
from towers.step.state import statistics as statistics_of
from towers.step.structures import map_tensors
from towers.step.transfers import packages
from towers.step.tensor_rows import is_composite

_LOSS = tf.TensorSpec([], tf.float32)


class Traffic(NamedTuple):
    """Bytes that one step moves between the parameters' device and another, by what they are.

    towers: the first and the last tower on that device. examples: the shard sizes there.
    parameters: and state that come in; where devices have copies, slices and state.
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
    statistics = statistics_of(model) if step.batch_norm == "average" else []
    summed = _specs([*model.trainable_variables, *statistics])
    known = set(map(id, statistics))
    exchanged = (_slices if step.strategy.num_copies else _sums)(step, [_LOSS, *summed])
    kept = _specs([v for v in model.non_trainable_variables if id(v) not in known])
    example = [spec for spec in tf.nest.flatten((x, y)) if spec is not None]
    outputs = _outputs(model, x)
    down = model.non_trainable_variables if step.strategy.num_copies else model.variables
    rows = []
    for device in dict.fromkeys(step.tower_devices):
        towers = [t for t, other in enumerate(step.tower_devices) if other == device]
        examples = sum(sizes[t] for t in towers)
        from_home = step.home != device  # what the parameters' device need not send itself
        own = kept if from_home and towers[0] == 0 else []
        bytes_in, bytes_out, sends_in, sends_out = exchanged[device]
        rows.append(
            Traffic(
                device,
                (towers[0], towers[-1]),
                [sizes[t] for t in towers],
                bytes_in + (_num_bytes(_specs(down)) if from_home else 0),
                examples * _num_bytes(example) if device != HOST else 0,
                bytes_out + _num_bytes(own),
                examples * _num_bytes(outputs) if from_home else 0,
                sends_in + (_sends_in(step, down, towers, example) if from_home else 0),
                sends_out + _num_sends(step, own) + from_home * len(towers) * len(outputs),
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


# (bytes in, bytes out, sends in, sends out) of each device.
_Exchanged: TypeAlias = dict[str, tuple[int, int, int, int]]


def _sums(step: TowerStep, values: Sequence[tf.TensorSpec]) -> _Exchanged:
    """The sums that leave each device, for another one or home; `values`: loss, gradients ...

    Adds nothing instead of gradients: the tree that a step of GPUs has. The loss' bytes are not
    counted.
    """
    tower_devices, home = step.tower_devices, step.home
    counts = dict.fromkeys(tower_devices, 0)

    def move(sums: Values, source: str, target: str | None) -> Values:
        counts[source] += source != target
        return sums

    partial_sums([[]] * len(tower_devices), tower_devices, add_on_devices=True, home=home,
                 move=move)
    size, sends = _num_bytes(values[1:]), _num_sends(step, values)
    return {device: (0, count * size, 0, count * sends) for device, count in counts.items()}


def _slices(step: TowerStep, values: Sequence[tf.TensorSpec]) -> _Exchanged:
    """The slices that devices with copies hand each other: of each subtree's sum, and of the sum.

    Each of D devices gets its slice of the others' subtrees, and hands what they add up to on to
    all others: 1 + (D - 2) / D models in and out, where each has one tower.
    """
    places = list(dict.fromkeys(step.tower_devices))
    others = len(places) - 1
    owners = [s.owner for s in subtrees(make_plan([places.index(d) for d in step.tower_devices]))]
    chosen = list(packages(values))
    size = sum(
        values[own[0]].dtype.size * -(-sum(map(math.prod, shapes)) // len(places))
        for own, shapes in chosen
    )
    found = {}
    for index, device in enumerate(places):
        own = owners.count(index)
        arriving, leaving = len(owners) - own + others, (own + 1) * others
        found[device] = (
            arriving * size, leaving * size, arriving * len(chosen), leaving * len(chosen)
        )
    return found


def _sends_in(
    step: TowerStep, variables: Sequence[keras.Variable], towers: Sequence[int],
    example: Sequence[tf.TensorSpec],
) -> int:
    """The tensors that a device of these towers receives from home; one is the loss scale."""
    shared = _num_sends(step, _specs([v for v in variables if not is_seed(v)]))
    seeds = _num_sends(step, _specs([v for v in variables if is_seed(v)]))  # each tower's own
    return shared + 1 + len(towers) * (seeds + len(example) + len(SHARES_SPEC))


def _example_spec(tensor: tf.Tensor) -> tf.TensorSpec:
    if is_composite(tensor) or not tensor.shape[1:].is_fully_defined():
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
    as_gpus_do = step.policy.pack_transfers or step.policy.shares_memory
    return sum(1 for _ in packages(specs)) if as_gpus_do else len(specs)
