"""Finds the stage, and so the level, of each operation of a tower whose layers are in stages.

    level:   0          1          2          3          4
    stage 0  forward                                     backward
    stage 1             forward               backward
    stage 2                        forward, loss, backward

Stages decide where an operation runs, never its value: the gradient equals the uncut tower's.
"""

import re
from collections.abc import Mapping

import tensorflow as tf

from towers.graph.walk import Key, follow, key_of

# oneDNN's kernels pass a workspace to their gradients, but only within one function.
_PAIRED = ("MaxPool", "MaxPool3D", "LRN")
_STAGE = re.compile(r"(?:^|/)stage_(\d+)(?:_\d+)?/")
_BACKWARD = "gradient_tape/"
_SIZES = ("Shape", "ShapeN", "Size", "Rank")  # depend on shapes alone
_RESOURCES = (tf.resource, tf.variant)  # rank 0, but not small: a loop's list of tensors


def stage_scope(stage: int) -> str:
    """Returns the name of the scope in which a stage's layers are traced."""
    return f"stage_{stage}"


class StageLevels:
    """Finds the levels of a traced tower: forward of stage s is s, backward is 2 * (S - 1) - s.

    A forward operation outside of all layers has the last level of its inputs. A backward one (of a
    regularizer) has the backward level of the first stage whose forward values it reads.
    """

    def __init__(self, num_stages: int, fed: Mapping[str, int]) -> None:
        """
        Args:
            num_stages: the number of stages, S.
            fed: the stage of each argument and capture of the function, by its name.
        """
        self._num_stages = num_stages
        self._fed = dict(fed)
        self._levels: dict[Key, int] = {}  # by operation
        self._anew: dict[Key, bool] = {}

    def is_fed(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tensor is an argument or a capture, which each level may take."""
        return tensor.name in self._fed

    def level(self, tensor: tf.Tensor) -> int:
        """Returns the level that computes a tensor."""
        return self._fed[tensor.name] if self.is_fed(tensor) else self.operation_level(tensor.op)

    def operation_level(self, operation: tf.Operation) -> int:
        """Returns the level that runs an operation."""
        return follow(
            operation, self._levels, lambda op: [v for v in op.inputs if not self.is_fed(v)],
            self._follows,
        )

    def stage(self, level: int) -> int:
        """Returns the stage that runs a level."""
        return min(level, 2 * (self._num_stages - 1) - level)

    def is_recomputed(self, tensor: tf.Tensor) -> bool:
        """Returns whether each level recomputes it: from constants and scalars, or as `_PAIRED`."""
        is_paired = tensor.op.type in _PAIRED
        return not self.is_fed(tensor) and (is_paired or self._is_made_anew(tensor.op))

    def _follows(self, operation: tf.Operation) -> int:
        levels = [self.level(v) for v in operation.inputs]
        level = max(levels, default=0)
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
            stage for v, stage in zip(operation.inputs, levels, strict=True)
            if stage < self._num_stages and _BACKWARD not in v.op.name and not self.is_recomputed(v)
            and not _is_scalar(v) and v.op.type not in _SIZES
        ]
        return max(level, last - min(forward)) if forward else level

    def _is_made_anew(self, operation: tf.Operation) -> bool:
        def needs(operation: tf.Operation) -> list[tf.Tensor]:
            """Returns its inputs except scalars, which levels pass on unless they are constants."""
            is_source = operation.op_def.is_stateful or operation.type == "Placeholder"
            return [] if is_source else [
                v for v in operation.inputs
                if not _is_scalar(v) or not self.is_fed(v) and v.op.type == "Const"
            ]

        def infer(operation: tf.Operation) -> bool:
            if operation.op_def.is_stateful or operation.type == "Placeholder":
                return False
            is_small = bool(operation.inputs) and all(map(_is_scalar, operation.outputs))
            return not is_small and all(self._anew[key_of(v.op)] for v in needs(operation))

        return follow(operation, self._anew, needs, infer)


def _is_scalar(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank == 0 and tensor.dtype not in _RESOURCES
