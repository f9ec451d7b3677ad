"""Cuts what towers compute between two meetings: at the stages of the layers, or behind noise.

    level:   0          1          2          3          4
    stage 0  forward                                     backward
    stage 1             forward               backward
    stage 2                        forward, loss, backward

A piece is one function of the operations of one level. Each tower calls it on the device of the
stage. The towers of a device group run as a pipeline, in the order of `in_order`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from towers.divide.compiling import noise_of
from towers.divide.context import reads
from towers.divide.facts import SIZE, Op, Tensors, Value
from towers.divide.run import Run
from towers.divide.stages import Stage
from towers.step.stages import STAGE_SCOPE, Stages, in_order

_STAGE = re.compile(rf"(?:^|/){STAGE_SCOPE}(\d+)(?:_\d+)?/")
_BACKWARD = "gradient_tape/"
# oneDNN's kernels pass a workspace to their gradients, but only within one function.
_PAIRED = {"MaxPoolGrad": "MaxPool", "MaxPool3DGrad": "MaxPool3D", "LRNGrad": "LRN"}


def levels_of(ops: Sequence[Op], num_stages: int) -> dict[Op, int]:
    """Returns the level of each operation that runs in the towers.

    The level of stage s is s forward and 2 * (S - 1) - s backward. Outside of all layers, a forward
    operation has the last level of its inputs. A backward one, such as the gradient of an activity
    regularizer, has the backward level of the first stage whose forward values it reads.

    Operations that read only the batch and whole values have the first level of their readers. The
    exception is a forward operation of a layer.

    ops: all operations of a step, in an order that they can run in.
    """
    in_towers = [op for op in ops if op.in_towers is not None and not op.is_made_where_read]
    levels: dict[Op, int] = {}
    for op in in_towers:
        known = [value for value, _ in reads(op) if value.op in levels]
        input_levels = [levels[value.op] for value in known]
        is_backward, stages = _BACKWARD in op.path, list(map(int, _STAGE.findall(op.path)[-1:]))
        if is_backward and not stages:
            stages = [
                levels[value.op] for value in known
                if levels[value.op] < num_stages and _BACKWARD not in value.op.path
                and value.fact != SIZE and value.shape.rank != 0
            ]  # fmt: skip
        if is_backward:
            stages = [2 * (num_stages - 1) - stage for stage in stages]
        # A loop also reads empty lists that its gradient made, which have no level.
        if input_levels or stages and not is_backward:
            levels[op] = max([*input_levels, *stages])
    first_read: dict[Op, int] = {}
    for op in reversed(in_towers):
        if op not in levels:  # without a reader, it is a part of the loss or of a metric
            levels[op] = first_read.get(op, num_stages - 1)
        for value, _ in reads(op):
            first_read[value.op] = min(levels[op], first_read.get(value.op, levels[op]))
    return levels


def stages_of(ops: Sequence[Op], read_after: Collection[Value], only_loops: bool) -> list[Stage]:
    """Returns what towers compute between two meetings: one stage, or its noise and the rest.

    XLA draws other numbers than TensorFlow from one seed. If nobody asked for XLA (`only_loops`),
    TensorFlow therefore draws the noise, before what XLA compiles.
    """
    stage = Stage(ops, read_after)
    noise = noise_of(ops) if only_loops and stage.is_small_loop else set()
    if not noise:
        return [stage]
    rest = [op for op in ops if op not in noise]
    read = {value for op in rest for value, _ in reads(op)} | set(read_after)
    return [Stage([op for op in ops if op in noise], read), Stage(rest, read_after)]


class Pipeline:
    """Computes the towers' part between two meetings, on the devices of their stages."""

    def __init__(
        self, ops: Sequence[Op], read_after: Collection[Value], levels: Mapping[Op, int],
        stages: Stages,
    ) -> None:  # fmt: skip
        """
        Args:
            ops: the operations, in an order that they can run in.
            read_after: the values that operations of other phases read.
            levels: from `levels_of`.
            stages: the stages of the layers.
        """
        self._stages = stages
        by_level: dict[int, list[Op]] = defaultdict(list)
        for op in ops:
            by_level[levels[op]].append(op)
        made_by = {value: levels[op] for op in ops for value in op.outputs}
        pieces = {level: _with_pairs(by_level[level], made_by) for level in sorted(by_level)}
        # A piece returns what other pieces or phases read, and nothing else crosses a device.
        read_later = {
            value for level, piece in pieces.items() for op in piece for value, _ in reads(op)
            if made_by.get(value, level) != level
        } | set(read_after)  # fmt: skip
        self._pieces: dict[int, Stage] = {}
        for level, piece in pieces.items():
            results = {value for value in read_later if made_by.get(value) == level}
            before = {value for value, made in made_by.items() if made < level}
            self._pieces[level] = Stage(piece, results, before)

    def call(self, run: Run) -> None:
        """Computes the results of each tower."""
        machine, received = run.machine, dict[int, list[Tensors]]()
        groups = [self._stages.groups[first] for first in machine.devices]
        num_stages = self._stages.num_stages
        for level, piece in self._pieces.items():
            stage = min(level, 2 * (num_stages - 1) - level)
            received[level] = piece.receive(run, [group[stage] for group in groups])
        for t, level, device in in_order(
            self._stages.groups, machine.devices, list(self._pieces)
        ):  # fmt: skip
            self._pieces[level].call_tower(run, t, device, received[level])


def _with_pairs(ops: Sequence[Op], made_by: Mapping[Value, int]) -> list[Op]:
    """Returns the operations of a piece, with those that their gradients need beside them.

    made_by: the values of all pieces.
    """
    piece: dict[Op, None] = {}
    for op in ops:
        for value in op.inputs:
            if _PAIRED.get(op.type) == value.op.type and value in made_by:
                piece[value.op] = None  # computed again
        piece[op] = None
    return list(piece)
