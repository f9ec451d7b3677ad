"""Finds in a traced graph whether towers' values of a tensor make the global batch's.

    loss = tf.reduce_mean(each)              a mean: weighs n_i / N
    loss = tf.nn.l2_loss(rows)               a sum: the towers' values add up
    loss = tf.sqrt(tf.reduce_mean(each))     neither: a fault, with the operation that did it

It walks from a tensor back to the shard's rows, and by `row_rules` forth again.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf

from towers.machine.tensorflow_internals import called_graph
from towers.machine.user_lines import line_of
from towers.graph.facts import (
    COUNT,
    ONE_LENGTH,
    ROWS,
    SHARED,
    UNKNOWN,
    Fact,
    Fault,
    first_fault,
    sizes,
    uneven,
)
from towers.graph.rules import infer


class Kind(NamedTuple):
    """Tells what a tensor is of the batch.

    name: "mean", "sum", or "other". fault: of an "other".
    """

    name: str
    fault: Fault | None = None


class Rows:
    """The facts of a graph that is being traced, by those of what it is fed."""

    def __init__(
        self, fed: Iterable[tuple[tf.Tensor, Fact]],
        is_shared: Callable[[tf.Tensor], bool] = lambda tensor: False,
    ) -> None:
        """
        Args:
            fed: tensors, and what they are.
            is_shared: whether all towers have one value of a tensor.
        """
        self._fed = {_name(tensor): fact for tensor, fact in fed}
        self._is_shared = is_shared
        self._known: dict[tuple[int, str], list[Fact]] = {}
        self._found: dict[tuple[str, str], str] = {}  # warnings, by line and fault

    @classmethod
    def of_shard(cls, leaves: Sequence[Any], **options: Any) -> "Rows":
        """The facts of a shard's tensors [n, ...] of any kind; None is passed over."""
        fed: list[tuple[tf.Tensor, Fact]] = []
        for leaf in leaves:
            is_composite = isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)
            fact = Fact(axis=0, local=True, each=None) if is_composite else ROWS
            tensors = tf.nest.flatten(leaf, expand_composites=True)
            fed += [(tensor, fact) for tensor in tensors if tf.is_symbolic_tensor(tensor)]
            if isinstance(leaf, tf.RaggedTensor):
                fed.append((leaf.row_splits, replace(fact, more=1)))
            if isinstance(leaf, tf.SparseTensor):
                others = [SHARED] * (leaf.dense_shape.shape[0] - 1)
                fed.append((leaf.dense_shape, sizes([COUNT, *others])))
        return cls(fed, **options)

    def declare(self, tensor: tf.Tensor, fact: Fact) -> None:
        """Says what a tensor is: its graph is not walked."""
        self._fed[_name(tensor)] = fact

    def kind(self, tensor: tf.Tensor) -> Kind:
        """The kind of a tensor, or of the sum over the rows of one with a batch axis."""
        fact = self.fact(tensor)
        if fact.fault:
            return Kind("other", fact.fault)
        if fact.padded:
            return Kind("other", Fault(
                tensor.op, "has rows as long as the longest row of the batch", ONE_LENGTH
            ))
        degree = None if fact.degree is None else fact.degree + fact.has_rows
        if degree not in (0, 1):
            return Kind("other", uneven(tensor.op))
        return Kind("sum" if degree else "mean")

    def check(self, tensor: tf.Tensor, use: str) -> Kind:
        """Its kind; an "other" is noted, once for each line.

        Args:
            tensor: what towers make one value of.
            use: what becomes of it, such as "the loss that a gradient is taken of".
        """
        kind = self.kind(tensor)
        if kind.fault:
            line, (_, what, remedy) = line_of(kind.fault.operation), kind.fault
            self._found.setdefault((line, what), (
                f"{line} {what}. Each tower has only its own rows of the batch, and {use} is not "
                f"the whole batch's. {remedy}"
            ))
        return kind

    def warn(self) -> list[str]:
        """Warns of all that `check` has noted, and returns it."""
        for message in self._found.values():
            warnings.warn(message, stacklevel=2)
        return [*self._found.values()]

    def fact(self, tensor: tf.Tensor) -> Fact:
        """A tensor's fact, by those of all before it: a stack, as graphs are deep."""
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            parts = [self.fact(v) for v in tf.nest.flatten(tensor, expand_composites=True)]
            is_local = any(part.local for part in parts)
            return replace(ROWS, fault=first_fault(parts)) if is_local else SHARED
        known = self._at_once(tensor)
        if known is not None:
            return known
        stack = [tensor.op]
        while stack:
            operation = stack.pop()
            if _key(operation) in self._known:
                continue
            waiting = [v.op for v in operation.inputs if self._at_once(v) is None]
            if waiting:
                stack.extend([operation, *waiting])
            else:
                facts = [self._at_once(v) or SHARED for v in operation.inputs]
                self._known[_key(operation)] = infer(operation, facts, _returned)
        return self._known[_key(tensor.op)][tensor.value_index]

    def _at_once(self, tensor: tf.Tensor) -> Fact | None:
        """The fact that is known without a walk."""
        if not tf.is_symbolic_tensor(tensor):
            return SHARED
        fed = self._fed.get(_name(tensor))
        if fed is not None:
            return fed
        known = self._known.get(_key(tensor.op))
        if known is not None:
            return known[tensor.value_index]
        if self._is_shared(tensor):
            return SHARED
        return self._of_placeholder(tensor) if tensor.op.type == "Placeholder" else None

    def _of_placeholder(self, tensor: tf.Tensor) -> Fact:
        """The fact of a graph's input: in a loop's that is being traced, its variables too."""
        for outside, inside in getattr(tensor.graph, "captures", ()):
            if inside is tensor:
                is_traced = tf.is_symbolic_tensor(outside) and outside.graph is not tensor.graph
                return self.fact(outside) if is_traced else SHARED
        if tensor.dtype in (tf.resource, tf.variant) or not tensor.dtype.is_floating:
            return SHARED
        if tensor.shape.rank is None:
            return Fact(axis=UNKNOWN, local=True)
        is_open = [size is None for size in tensor.shape.as_list()]
        return Fact(axis=is_open.index(True), local=True) if any(is_open) else SHARED


def _returned(
    operation: tf.Operation, name: str, facts: Sequence[Fact]
) -> list[Fact] | None:
    """The facts of what a function in the graph returns; None where it cannot be seen."""
    graph = called_graph(operation, name)
    if graph is None or len(graph.inputs) != len(facts):
        return None
    inner = Rows(zip(graph.inputs, facts))
    return [inner.fact(tensor) for tensor in graph.outputs]


def _name(tensor: tf.Tensor) -> tuple[int, str]:
    return id(tensor.graph), tensor.name


def _key(operation: tf.Operation) -> tuple[int, str]:
    return id(operation.graph), operation.name
