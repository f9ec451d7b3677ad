"""Tells which tensors of a traced step depend on a tower's shard, and on how many collectives.

    x (a shard)  --> loss, gradient               local, level 0
                              |
                           collective
                              |
                     the towers' sum  --> clipped     not local, level 1

A local tensor has a value for each tower; any other tensor has one value for all towers.
"""

import tensorflow as tf

from towers.graph.walk import Key, before, follow, key_of

# These pass on a value; any other stateful operation counts as noise that each tower draws.
_CARRIERS = ("ReadVariableOp", "Placeholder")
_SIZES = ("Shape", "Size", "Rank", "ZerosLike", "OnesLike")  # depend on shapes alone


class Dependence:
    """Tells what the tensors of a graph that is being traced depend on, given the tensors fed."""

    def __init__(self) -> None:
        # (local, level): whether a value depends on a tower's shard or noise; the number of
        # collectives and updates before it, along the longest path.
        self._fed: dict[Key, tuple[bool, int]] = {}  # for tensors
        self._known: dict[Key, tuple[bool, int]] = {}  # for operations

    def feed(self, tensor: tf.Tensor, *, local: bool, level: int) -> None:
        """Declares a tensor from outside of the levels: a shard, a read, a collective's result."""
        self._fed[key_of(tensor)] = local, level

    def is_fed(self, tensor: tf.Tensor) -> bool:
        """Returns whether `feed` has declared the tensor."""
        return key_of(tensor) in self._fed

    def local(self, tensor: tf.Tensor, *, but_sizes: bool = False) -> bool:
        """Returns whether towers have different values of the tensor.

        Args:
            tensor: a tensor of the graph, of any kind.
            but_sizes: ignore values that depend on the shape of a shard alone.
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
        """Returns the number of collectives and updates before the tensor."""
        return self._of(tensor)[1]

    def operation_level(self, operation: tf.Operation) -> int:
        """Returns the number of collectives and updates before the operation."""
        return self._of_operation(operation)[1]

    def is_recomputed(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tensor is a constant, which every level computes for itself."""
        operation = tensor.op
        is_source = not operation.inputs and operation.type != "Placeholder"
        return is_source and not operation.op_def.is_stateful

    def _of(self, tensor: tf.Tensor) -> tuple[bool, int]:
        if not tf.is_symbolic_tensor(tensor):  # a value from before the trace
            return False, 0
        return self._fed.get(key_of(tensor)) or self._of_operation(tensor.op)

    def _of_operation(self, operation: tf.Operation) -> tuple[bool, int]:
        def infer(operation: tf.Operation) -> tuple[bool, int]:
            found = [self._of(v) for v in operation.inputs]
            is_local = _draws(operation) or any(local for local, _ in found)
            return is_local, max((level for _, level in found), default=0)

        return follow(
            operation, self._known, lambda op: [v for v in op.inputs if not self.is_fed(v)], infer
        )


def _draws(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful and operation.type not in _CARRIERS
