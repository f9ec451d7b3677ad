"""Tells on how many collectives a tensor of a traced step depends, and in which stage it runs.

    x (a shard)  --> loss, gradient               local, level 0
                              |
                           collective
                              |
                     the towers' sum  --> clipped     not local, level 1

A local tensor has a value for each tower; any other tensor has one value for all towers. If the
layers of a tower are in stages, an operation's stage decides its level:

    level:   0          1          2          3          4
    stage 0  forward                                     backward
    stage 1             forward               backward
    stage 2                        forward, loss, backward

Stages decide where an operation runs, never its value: the gradient equals the uncut tower's.
"""

import re
from collections.abc import Iterable

import tensorflow as tf

from towers.graph.walk import Key, before, follow, key_of

# These pass on a value; any other stateful operation counts as noise that each tower draws.
_CARRIERS = ("ReadVariableOp", "Placeholder")
_SIZES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")  # depend on shapes alone


class Dependence:
    """Tells what the tensors of a graph that is being traced depend on, given the tensors fed."""

    def __init__(self, shard: Iterable[tf.Tensor] = ()) -> None:
        """`shard`: tensors that differ between towers, of level 0."""
        # (local, level): whether a value depends on a tower's shard or noise; the number of
        # collectives and updates before it, along the longest path.
        self._fed = {key_of(tensor): (True, 0) for tensor in shard}
        self._known: dict[Key, tuple[bool, int]] = {}  # for operations

    def feed(self, tensor: tf.Tensor, *, local: bool, level: int) -> None:
        """Declares a tensor from outside of the levels: a shard, a read, a collective's result."""
        self._fed[key_of(tensor)] = local, level

    def is_fed(self, tensor: tf.Tensor) -> bool:
        """Returns whether `feed` has declared the tensor."""
        return key_of(tensor) in self._fed

    def local(self, tensor: tf.Tensor, *, but_sizes: bool = False) -> bool:
        """Returns whether towers have different values of a tensor of any kind.

        `but_sizes` ignores values that depend on the shape of a shard alone.
        """
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            parts = tf.nest.flatten(tensor, expand_composites=True)
            return any(self.local(part, but_sizes=but_sizes) for part in parts)
        is_local, _ = self._of(tensor)
        if is_local and but_sizes:
            reached = before([tensor], lambda v: self.is_fed(v) or v.op.type in _SIZES)
            return any(
                self._fed[key_of(v)][0] if self.is_fed(v) else _draws(v.op) for v, _ in reached
            )
        return is_local

    def level(self, tensor: tf.Tensor) -> int:
        """Returns the level that computes the tensor."""
        return self._of(tensor)[1]

    def operation_level(self, operation: tf.Operation) -> int:
        """Returns the level that runs the operation."""
        return self._of_operation(operation)[1]

    def is_recomputed(self, tensor: tf.Tensor) -> bool:
        """Returns whether each level computes the tensor for itself: a constant."""
        return not tensor.op.inputs and not _is_source(tensor.op)

    def _of(self, tensor: tf.Tensor) -> tuple[bool, int]:
        if not tf.is_symbolic_tensor(tensor):  # a value from before the trace
            return False, 0
        return self._fed.get(key_of(tensor)) or self._of_operation(tensor.op)

    def _of_operation(self, operation: tf.Operation) -> tuple[bool, int]:
        def needs(operation: tf.Operation) -> list[tf.Tensor]:
            return [v for v in operation.inputs if not self.is_fed(v)]

        return follow(operation, self._known, needs, self._infer)

    def _infer(self, operation: tf.Operation) -> tuple[bool, int]:
        found = [self._of(v) for v in operation.inputs]
        is_local = _draws(operation) or any(local for local, _ in found)
        return is_local, max((level for _, level in found), default=0)


def _draws(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful and operation.type not in _CARRIERS


def _is_source(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful or operation.type == "Placeholder"


def _is_scalar(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank == 0 and tensor.dtype not in _RESOURCES


# oneDNN's kernels pass a workspace to their gradients, but only within one function.
_PAIRED = ("MaxPool", "MaxPool3D", "LRN")
_STAGE = re.compile(r"(?:^|/)stage_(\d+)(?:_\d+)?/")
_BACKWARD = "gradient_tape/"
_RESOURCES = (tf.resource, tf.variant)  # rank 0, but not small: a loop's list of tensors


class StageLevels(Dependence):
    """Finds the levels of a traced tower: forward of stage s is s, backward is 2 * (S - 1) - s.

    A forward operation outside of all layers has the last level of its inputs. A backward one (of a
    regularizer) has the backward level of the first stage whose forward values it reads. The level
    of a tensor that is fed is its stage.
    """

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self._num_stages = num_stages
        self._anew: dict[Key, bool] = {}

    def is_recomputed(self, tensor: tf.Tensor) -> bool:
        """Returns whether each level recomputes it: from constants and scalars, or as `_PAIRED`."""
        return tensor.op.type in _PAIRED or self._is_made_anew(tensor.op)

    def _infer(self, operation: tf.Operation) -> tuple[bool, int]:
        is_local, level = super()._infer(operation)
        is_backward, found = _BACKWARD in operation.name, _STAGE.findall(operation.name)
        if self._is_made_anew(operation) or not (found or is_backward):
            return is_local, level
        stages = [int(found[-1])] if found else [
            self.level(v) for v in operation.inputs
            if self.level(v) < self._num_stages and _BACKWARD not in v.op.name
            and not (self.is_recomputed(v) or _is_scalar(v) or v.op.type in _SIZES)
        ]
        if is_backward:
            stages = [2 * (self._num_stages - 1) - stage for stage in stages]
        return is_local, max([level, *stages])

    def _is_made_anew(self, operation: tf.Operation) -> bool:
        def needs(operation: tf.Operation) -> list[tf.Tensor]:
            """Returns its inputs except scalars, which levels pass on."""
            is_source = _is_source(operation)
            return [] if is_source else [v for v in operation.inputs if not _is_scalar(v)]

        def infer(operation: tf.Operation) -> bool:
            is_small = bool(operation.inputs) and all(map(_is_scalar, operation.outputs))
            is_passed_on = is_small or _is_source(operation)
            return not is_passed_on and all(self._anew[key_of(v.op)] for v in needs(operation))

        return follow(operation, self._anew, needs, infer)
