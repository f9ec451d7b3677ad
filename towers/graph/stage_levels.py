"""Tells the stage of each operation of a tower whose layers are in stages, and so its level.

    level:   0          1          2          3          4
    stage 0  forward                                     backward
    stage 1             forward               backward
    stage 2                        forward, loss, backward

A stage says where an operation runs, never what is computed: the gradient is the uncut tower's.
"""

import re
from collections.abc import Mapping

import tensorflow as tf

# oneDNN's kernels hand their gradients a workspace, where both stand in one function alone.
_PAIRED = ("MaxPool", "MaxPool3D", "LRN")
_STAGE = re.compile(r"(?:^|/)stage_(\d+)(?:_\d+)?/")
_BACKWARD = "gradient_tape/"
_SIZES = ("Shape", "ShapeN", "Size", "Rank")  # what no value has a part in
_RESOURCES = (tf.resource, tf.variant)  # such as a loop's list of tensors: one, and yet not small


def stage_scope(stage: int) -> str:
    """The name of the scope that a stage's layers are traced in."""
    return f"stage_{stage}"


class StageLevels:
    """The levels of a traced tower: forward of stage s is s, backward is 2 * (S - 1) - s.

    An operation outside of all layers is where its inputs are: the last of them, going forward;
    going backward, where the first stage's forward values are that it reads (a regularizer's).
    """

    def __init__(self, num_stages: int, fed: Mapping[str, int]) -> None:
        """
        Args:
            num_stages: S.
            fed: by the names of the function's arguments and captures, their stage.
        """
        self._num_stages = num_stages
        self._fed = dict(fed)
        self._levels: dict[str, int] = {}  # by an operation's name
        self._anew: dict[str, bool] = {}

    def is_fed(self, tensor: tf.Tensor) -> bool:
        """Whether the tensor is an argument or a capture: each level may take it."""
        return tensor.name in self._fed

    def level(self, tensor: tf.Tensor) -> int:
        """The level that a tensor is computed in."""
        if self.is_fed(tensor):
            return self._fed[tensor.name]
        return self.operation_level(tensor.op)

    def operation_level(self, operation: tf.Operation) -> int:
        """The level of an operation, by those of all before it: a stack, as graphs are deep."""
        stack = [operation]
        while stack:
            last = stack[-1]
            unknown = [v.op for v in last.inputs
                       if not self.is_fed(v) and v.op.name not in self._levels]
            if last.name in self._levels or not unknown:
                stack.pop()
                if last.name not in self._levels:
                    self._levels[last.name] = self._follows(last)
            else:
                stack.extend(unknown)
        return self._levels[operation.name]

    def stage(self, level: int) -> int:
        """The stage that a level is run in."""
        return min(level, 2 * (self._num_stages - 1) - level)

    def is_anew(self, tensor: tf.Tensor) -> bool:
        """Whether each level makes the tensor for itself: it follows from constants and scalars."""
        if self.is_fed(tensor):
            return False
        return tensor.op.type in _PAIRED or self._is_made_anew(tensor.op)

    def _follows(self, operation: tf.Operation) -> int:
        before = [self._fed.get(v.name, self._levels.get(v.op.name, 0)) for v in operation.inputs]
        level = max(before, default=0)
        if self._is_made_anew(operation):
            return level
        last = 2 * (self._num_stages - 1)
        is_backward = _BACKWARD in operation.name
        found = _STAGE.findall(operation.name)
        if found:
            stage = int(found[-1])
            return max(level, last - stage if is_backward else stage)
        if not is_backward:
            return level
        forward = [
            stage for v, stage in zip(operation.inputs, before, strict=True)
            if stage < self._num_stages and _BACKWARD not in v.op.name and not self.is_anew(v)
            and not self._is_scalar(v) and v.op.type not in _SIZES
        ]
        return max(level, last - min(forward)) if forward else level

    def _is_made_anew(self, operation: tf.Operation) -> bool:
        stack = [operation]
        while stack:
            last = stack[-1]
            asked = [v for v in last.inputs if not self._crosses(v)]
            unknown = [v.op for v in asked if v.op.name not in self._anew]
            is_source = last.op_def.is_stateful or last.type == "Placeholder"
            if last.name in self._anew or is_source or not unknown:
                stack.pop()
                if last.name not in self._anew:
                    is_small = bool(last.inputs) and all(map(self._is_scalar, last.outputs))
                    self._anew[last.name] = not (is_source or is_small) and all(
                        self._anew[v.op.name] for v in asked
                    )
            else:
                stack.extend(unknown)
        return self._anew[operation.name]

    def _crosses(self, tensor: tf.Tensor) -> bool:
        """Whether it is a scalar that levels hand on; constants need not be."""
        return self._is_scalar(tensor) and (self.is_fed(tensor) or tensor.op.type != "Const")

    def _is_scalar(self, tensor: tf.Tensor) -> bool:
        return tensor.shape.rank == 0 and tensor.dtype not in _RESOURCES
