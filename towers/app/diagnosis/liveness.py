"""Estimates the memory of one tower: which values of its operations are live at the same time.

operations of a tower, in the order of their phases  -->  bytes of values that later ones read
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import tensorflow as tf

from towers.app.diagnosis.loop_memory import list_bytes
from towers.divide.facts import PART, Op, Value, rows as rows_at
from towers.divide.phases import Phases

# Their result is, or lies in, the memory of their first input.
_VIEWS = frozenset(
    """Identity Reshape ExpandDims Squeeze StopGradient PreventGradient
    TensorListFromTensor""".split()
)
# They write over an input of the same size that nothing reads later.
_IN_PLACE = frozenset(
    """Add AddV2 AddN Sub Mul RealDiv Neg Exp Maximum Minimum BiasAdd Relu ReluGrad Relu6 Relu6Grad
    Sigmoid SigmoidGrad Tanh TanhGrad Erf Square SquaredDifference Rsqrt Softmax Select
    SelectV2""".split()
)


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


class _Buffers:
    """Holds which memory the values of a tower have: a view has the memory of another value."""

    def __init__(self, ops: Sequence[Op], towers: Collection[Op], rows: int) -> None:
        """
        ops: the operations in their order. towers: the operations that run in a tower. rows: the
            number of the tower's rows.
        """
        self._of: dict[Value, Value] = {}
        self.sizes: dict[Value, int] = {}  # in bytes
        for op in ops:
            for value in op.outputs:
                self.sizes[value] = _num_bytes(value, rows, self.sizes)
                source = value
                if op.type in _VIEWS and op in towers:
                    source = op.inputs[0]
                self._of[value] = self.of(source)

    def of(self, value: Value) -> Value:
        """Returns the value whose memory a value has."""
        return self._of.get(value, value)

    def ends(self, ops: Sequence[Op], towers: Collection[Op]) -> dict[int, list[Value]]:
        """Returns, by the place of an operation, the values of towers that nothing reads later."""
        last: dict[Value, int] = {}
        for i, op in enumerate(ops):
            for value in (*op.inputs, *op.outputs):
                last[self.of(value)] = i
        found: dict[int, list[Value]] = defaultdict(list)
        for value, i in last.items():
            if value.op in towers:
                found[i].append(value)
        return found

    def made(self, op: Op, gradients: Collection[Value]) -> int:
        """Returns the bytes that an operation of a tower adds, without the gradients."""
        own = [value for value in op.outputs if self.of(value) is value]
        return sum(self.sizes[value] for value in own if value not in gradients)

    def writes_over(self, op: Op, ended: Collection[Value], made: int) -> bool:
        """Returns whether an operation writes over an input that nothing reads later."""
        inputs = {self.of(value) for value in op.inputs} & set(ended)
        return op.type in _IN_PLACE and any(self.sizes[value] == made for value in inputs)


def tower_memory(phases: Phases, rows: int) -> TowerMemory:
    """Returns the bytes of a tower with so many rows in the update with these phases.

    A loop counts with its results, and with what it keeps of each time step for its gradient.
    Kernels need further space while they run.
    """
    towers = {op for phase, ops in phases.items() if phase % 2 == 0 for op in ops}
    order = [op for _, ops in sorted(phases.items()) for op in ops]
    buffers = _Buffers(order, towers, rows)
    # Parts of sums that are read at the end wait for the update: the gradients.
    read = {buffers.of(value) for op in phases[max(phases)] for value in op.inputs}
    gradients = {value for value in read if value.op in towers and value.fact == PART}
    ends = buffers.ends(order, towers)
    stages, size, position = [], 0, 0
    for phase, ops in sorted(phases.items()):
        before = most = size
        for i, op in enumerate(ops, position):
            ended = [value for value in ends[i] if value not in gradients]
            made = buffers.made(op, gradients) if op in towers else 0
            size += made
            if buffers.writes_over(op, ended, made):
                most = max(most, size - made)
            else:
                most = max(most, size)
            size -= sum(buffers.sizes[value] for value in ended)
        position += len(ops)
        if phase % 2 == 0:
            stages.append(Stage(most, max(before, size)))
    given = {v for op in towers for v in op.inputs if v.op.type == "Placeholder"}
    shard = sum(_num_bytes(value, rows, {}) for value in given if value.fact == rows_at(0))
    return TowerMemory(rows, sum(buffers.sizes[v] for v in gradients), shard, stages)


def _num_bytes(value: Value, rows: int, sizes: Mapping[Value, int]) -> int:
    """Returns the bytes of a value of a tower with so many rows; sizes: of the values before it."""
    if value.dtype == tf.variant:
        return list_bytes(value, rows)
    if value.dtype in (tf.resource, tf.string):
        return 0
    shape = value.shape.as_list() if value.shape.rank is not None else [None, None]
    if shape.count(None) > 1:  # such as a sum over axes that follow from shapes
        return max((sizes.get(given, 0) for given in value.op.inputs), default=0)
    each = rows * (value.rows_each or 1)
    return int(value.dtype.size * math.prod(each if n is None else n for n in shape))
