"""Tells which tensors of a traced step depend on a tower's shard, and on how many collectives.

    x (a shard)  --> loss, gradient               local, level 0
                              |
                           collective
                              |
                     the towers' sum  --> clipped     not local, level 1

What is local is computed on every tower; what is not has one value, which is computed at home.
"""

from typing import NamedTuple

import tensorflow as tf

# Stateful, and yet without a value of their own.
_CARRIERS = ("ReadVariableOp", "Placeholder")
_SIZES = ("Shape", "Size", "Rank", "ZerosLike", "OnesLike")  # what no value has a part in


class Fact(NamedTuple):
    """The dependence of a tensor on a shard and on collectives.

    local: it depends on a shard, or on a tower's own noise.
    level: collectives and updates before it, along the longest path.
    """

    local: bool
    level: int


class Dependence:
    """The facts of a graph that is being traced; they follow from those of what it is fed."""

    def __init__(self) -> None:
        # By the graph and the name: a loop's graph may have the names of the one around it.
        self._fed: dict[tuple[int, str], Fact] = {}  # of tensors
        self._operations: dict[tuple[int, str], Fact] = {}

    def feed(self, tensor: tf.Tensor, *, local: bool, level: int) -> None:
        """A tensor whose value comes from outside of the levels: a shard, a read, a collective."""
        self._fed[_key(tensor)] = Fact(local, level)

    def is_fed(self, tensor: tf.Tensor) -> bool:
        """Whether `feed` was told of the tensor."""
        return _key(tensor) in self._fed

    def local(self, tensor: tf.Tensor, *, but_sizes: bool = False) -> bool:
        """Whether towers have different values of it.

        Args:
            tensor: of the graph.
            but_sizes: pass over what follows from the shape of a shard alone.
        """
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            parts = tf.nest.flatten(tensor, expand_composites=True)
            return any(self.local(part, but_sizes=but_sizes) for part in parts)
        if not but_sizes or not self._fact(tensor).local:
            return self._fact(tensor).local
        waiting, seen = [tensor], set()
        while waiting:
            last = waiting.pop()
            fed = self._fed.get(_key(last))
            if fed.local if fed else _draws(last.op):
                return True
            if fed is None and last.op.type not in _SIZES and _key(last) not in seen:
                seen.add(_key(last))
                waiting += last.op.inputs
        return False

    def level(self, tensor: tf.Tensor) -> int:
        """The collectives and updates before it."""
        return self._fact(tensor).level

    def is_anew(self, tensor: tf.Tensor) -> bool:
        """Whether each level makes the tensor for itself: a constant."""
        operation = tensor.op
        is_source = not operation.inputs and operation.type != "Placeholder"
        return is_source and not operation.op_def.is_stateful

    def operation_level(self, operation: tf.Operation) -> int:
        """The collectives and updates before it."""
        return self._operation(operation).level

    def _fact(self, tensor: tf.Tensor) -> Fact:
        if not tf.is_symbolic_tensor(tensor):  # a value that was there before the trace
            return Fact(local=False, level=0)
        return self._fed.get(_key(tensor)) or self._operation(tensor.op)

    def _operation(self, operation: tf.Operation) -> Fact:
        """The fact of an operation, by those of all before it: a stack, as graphs are deep."""
        stack = [operation]
        while stack:
            last = stack.pop()
            if _key(last) in self._operations:
                continue
            unknown = [
                v.op for v in last.inputs
                if _key(v) not in self._fed and _key(v.op) not in self._operations
            ]
            if unknown:
                stack.extend([last, *unknown])
            else:
                self._operations[_key(last)] = self._follows(last)
        return self._operations[_key(operation)]

    def _follows(self, operation: tf.Operation) -> Fact:
        facts = [self._fed.get(_key(v)) or self._operations[_key(v.op)] for v in operation.inputs]
        return Fact(
            _draws(operation) or any(fact.local for fact in facts),
            max((fact.level for fact in facts), default=0),
        )


def _draws(operation: tf.Operation) -> bool:
    return operation.op_def.is_stateful and operation.type not in _CARRIERS


def _key(named: tf.Tensor | tf.Operation) -> tuple[int, str]:
    return id(named.graph), named.name
