"""What each stage of a tower holds, and what crosses to the others: layers and bytes.

    stage 0   --- outputs that later stages read ---->   stage 1
              <-- gradients of these ---------------

Read from the traced tower: what its forward pass leaves for a backward pass on the same device is
held from the one to the other. The last stage makes both at once.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from towers.app.diagnosis import plan
from towers.app.reporting.formats import format_bytes
from towers.step import TowerStep
from towers.step.sharding import shard_sizes
from towers.step.staged import StagedTower


class StageTraffic(NamedTuple):
    """One stage, in bytes; of a tower with the largest shard, where it depends on examples.

    devices: that compute it, one of each device group. layers: by name.
    parameters: that a device of it receives each step, and whose gradients it sends.
    held: between a tower's forward and its backward pass; None: the last stage makes both at once.
    most_towers: that are held at a time.
    later, back: sent to later stages, and, as gradients, to those before.
    """

    devices: list[str]
    layers: list[str]
    parameters: int
    held: int | None
    most_towers: int
    later: int
    back: int


def stage_traffic(step: TowerStep, batch_size: int, batch: Any) -> list[StageTraffic]:
    """The stages of a step.

    Args:
        step: the towers, in stages.
        batch_size: the global batch.
        batch: x, y or x, y, sample_weight of it, or their specs.
    """
    assert step.stages is not None
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    tower, _ = step.tower.trace("train", (x, y, sample_weight))
    assert isinstance(tower, StagedTower)
    num_stages, rows = step.stages.num_stages, shard_sizes(batch_size, step.num_towers)[0]
    made_at = {name: at for at, segment in tower.segments.items() for name in segment.outputs}
    reads = {at: set(segment.inputs) & set(made_at) for at, segment in tower.segments.items()}
    trained = zip(step.trainable_variables, step.stages.of(step.trainable_variables))
    parameters = [0] * num_stages
    for variable, stage in trained:
        parameters[stage] += plan.num_bytes(variable.value)

    def size(names: set[str]) -> int:
        return sum(plan.num_bytes(tower.function.graph.get_tensor_by_name(n), rows) for n in names)

    def sent(level: int, to: range) -> int:
        own = {name for name, at in made_at.items() if at == level}
        return sum(size(own & reads.get(other, set())) for other in to)

    found = []
    for stage in range(num_stages):
        last = 2 * (num_stages - 1)
        held = {n for n in reads.get(last - stage, ()) if made_at[n] < num_stages}
        towers = max(step.tower_devices.count(first) for first in step.stages.groups)
        found.append(StageTraffic(
            [group[stage] for group in step.stages.groups.values()],
            step.stages.names[stage],
            parameters[stage],
            None if stage == num_stages - 1 else size(held),
            min(towers, num_stages - stage) if step.policy.take_turns else towers,
            sent(stage, range(stage + 1, num_stages)),
            sent(last - stage, range(last - stage + 1, last + 1)),
        ))
    return found


def table(found: Sequence[StageTraffic]) -> list[str]:
    """The stages as lines of aligned columns."""
    cells = [["stage", "on", "parameters", "held by a tower", "towers at most", "to later stages",
              "back", "layers"]]
    for stage, row in enumerate(found):
        first, *others = row.layers
        layers = f"{first} ... {others[-1]} ({len(row.layers)})" if others else first
        held = "-" if row.held is None else format_bytes(row.held)
        cells.append([
            str(stage), ", ".join(row.devices), format_bytes(row.parameters), held,
            str(row.most_towers), plan.moved(row.later), plan.moved(row.back), layers,
        ])
    return plan.aligned(cells)
