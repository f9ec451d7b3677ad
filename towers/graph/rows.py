"""Finds in a traced graph whether the towers' values of a tensor determine the batch's value.

    loss = tf.reduce_mean(each)              a mean: weighs n_i / N
    loss = tf.nn.l2_loss(rows)               a sum: the towers' values add up
    loss = tf.sqrt(tf.reduce_mean(each))     neither: a fault, with the operation that causes it

The walk goes from a tensor back to the shard's rows. Then `rules` derive the facts in the order of
computation, also inside of functions that the graph calls.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from towers.machine.tensorflow_internals import called_graphs
from towers.machine.user_lines import line_of
from towers.graph.elements import row_by_row
from towers.graph.facts import (
    COUNT, ONE_LENGTH, OPAQUE, ROWS, SHARED, UNEVEN, Fact, Fault, Op, first_fault,
    open_axis, sizes,
)
from towers.graph.rules import forgive, infer, with_padding
from towers.graph.walk import Key, follow, key_of


class Rows:
    """Derives the facts of a graph that is being traced from the facts of the tensors fed."""

    def __init__(
        self, fed: Iterable[tuple[tf.Tensor, Fact]],
        is_shared: Callable[[tf.Tensor], bool] = lambda tensor: False,
    ) -> None:
        """Args: is_shared: returns whether all towers have the same value of a tensor."""
        self._fed = {key_of(tensor): fact for tensor, fact in fed}
        self._is_shared = is_shared
        self._known: dict[Key, list[Fact]] = {}
        self._found: dict[tuple[str, str], str] = {}  # warnings, by line and fault

    @classmethod
    def of_shard(cls, leaves: Sequence[Any], **options: Any) -> "Rows":
        """Creates the facts from a shard's tensors [n, ...] of any kind; None is skipped."""
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
        """Sets the fact of a tensor, so that its graph is not walked."""
        self._fed[key_of(tensor)] = fact

    def kind(self, tensor: tf.Tensor) -> Fact:
        """Returns the fact of a tensor, with a fault if its `name` is "other" or it is padded."""
        fact = self.fact(tensor)
        if fact.fault:
            return fact
        if fact.padded:
            what = "has rows as long as the longest row of the batch"
            return replace(fact, fault=Fault(tensor.op, what, ONE_LENGTH))
        return replace(fact, fault=Fault(tensor.op, *UNEVEN)) if fact.name == "other" else fact

    def check(self, tensor: tf.Tensor, use: str) -> Fact:
        """Returns a tensor's `kind`; records a fault and its use for `warn`, once a line."""
        fact = self.kind(tensor)
        if fact.fault:
            line, (_, what, remedy) = line_of(fact.fault.operation), fact.fault
            self._found.setdefault((line, what), (
                f"{line} {what}. Each tower has only its own rows of the batch, and {use} is not "
                f"the whole batch's. {remedy}"
            ))
        return fact

    def warn(self) -> list[str]:
        """Warns of all faults that `check` has recorded, and returns the messages."""
        for message in self._found.values():
            warnings.warn(message, stacklevel=2)
        return [*self._found.values()]

    def fact(self, tensor: tf.Tensor) -> Fact:
        """Returns the fact of a tensor of any kind, from the facts of all tensors before it."""
        if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
            parts = [self.fact(v) for v in tf.nest.flatten(tensor, expand_composites=True)]
            is_local = any(part.local for part in parts)
            return replace(ROWS, fault=first_fault(parts)) if is_local else SHARED
        known = self._at_once(tensor)
        if known is not None:
            return known

        def infer_all(operation: tf.Operation) -> list[Fact]:
            op = Op(operation, [self._at_once(v) or SHARED for v in operation.inputs])
            found = _CALLS[op.type](op) if op.type in _CALLS else infer(op)
            return [
                with_padding(op, output, forgive(op, fact))
                for output, fact in zip(operation.outputs, found, strict=True)
            ]

        def needs(operation: tf.Operation) -> list[tf.Tensor]:
            return [v for v in operation.inputs if self._at_once(v) is None]

        return follow(tensor.op, self._known, needs, infer_all)[tensor.value_index]

    def _at_once(self, tensor: tf.Tensor) -> Fact | None:
        """Returns the fact if it is known without a walk, else None."""
        if not tf.is_symbolic_tensor(tensor):
            return SHARED
        if key_of(tensor) in self._fed:
            return self._fed[key_of(tensor)]
        if key_of(tensor.op) in self._known:
            return self._known[key_of(tensor.op)][tensor.value_index]
        if self._is_shared(tensor):
            return SHARED
        return self._of_placeholder(tensor) if tensor.op.type == "Placeholder" else None

    def _of_placeholder(self, tensor: tf.Tensor) -> Fact:
        """Returns the fact of a graph's input, such as a variable of a loop that is traced now."""
        for outside, inside in getattr(tensor.graph, "captures", ()):
            if inside is tensor:
                is_traced = tf.is_symbolic_tensor(outside) and outside.graph is not tensor.graph
                return self.fact(outside) if is_traced else SHARED
        if tensor.dtype in (tf.resource, tf.variant) or not tensor.dtype.is_floating:
            return SHARED
        axis = open_axis(tensor)
        return SHARED if axis is None else Fact(axis=axis, local=True)


def _returned(op: Op, name: str, facts: Sequence[Fact]) -> list[list[Fact]]:
    """Returns the facts of the outputs of each function in an attribute whose graph is known."""
    return [
        list(map(Rows(zip(graph.inputs, facts)).fact, graph.outputs))
        for graph in called_graphs(op.operation, name) if len(graph.inputs) == len(facts)
    ]


def _row_by_row(op: Op) -> list[Fact]:
    return [row_by_row(op, output) for output in op.operation.outputs]


def _decide(*names: str) -> Callable[[Op], list[Fact]]:
    """Returns the rule of a tf.cond, or a tf.switch_case, whose results come from one branch."""

    def rule(op: Op) -> list[Fact]:
        condition, *facts = op.facts
        branches = [found for name in names for found in _returned(op, name, facts)]
        found = [
            replace(op.add(pair), each=None) if None in [f.each for f in pair] else op.add(pair)
            for pair in zip(*branches)
        ] or _row_by_row(op)
        if condition.local:
            what = "(tf.cond) decides by a value that is made of all rows of the batch"
            if condition.fault and condition.fault.what == OPAQUE:  # by one row, in a loop
                what = OPAQUE
            decided = op.faulty(SHARED, what)
            return [op.faulty(replace(f, fault=first_fault([f, decided])), what) for f in found]
        is_even = condition.degree == 0
        return [fact if is_even or not fact.local else op.faulty(fact, *UNEVEN) for fact in found]

    return rule


_MOST_ROUNDS = 4  # of a loop's body, until the facts of its variables stay the same


def _loop(op: Op) -> list[Fact]:
    """Returns the facts of a loop; follows its condition and its body.

    Lists count as rows. So does one row (OPAQUE) that a round takes, if it meets no other row.
    """
    rough = [
        SHARED if not output.dtype.is_floating and open_axis(output) is None
        and output.dtype != tf.variant else fact
        for output, fact in zip(op.operation.outputs, _row_by_row(op))
    ]
    before, graphs = op.facts, called_graphs(op.operation, "body")
    for _ in range(_MOST_ROUNDS):
        faults = [goes_on.fault for (goes_on,) in _returned(op, "cond", before)]
        faults += [  # of a variable that takes a row's value to the next row
            new.fault for old, new, output in zip(op.facts, before, op.operation.outputs)
            if new.fault and new.fault.what == OPAQUE and new.fault.operation.graph in graphs
            and not old.fault and output.dtype != tf.variant
        ]
        for fault in filter(None, faults):
            return [replace(f, fault=f.fault or fault) if f.local else f for f in rough]
        for after in _returned(op, "body", before):
            merged = [_merge(*pair) for pair in zip(before, after)]
            if merged == before:
                return [
                    b if known.fault and a == b else known
                    if known.fault or not b.fault or b.fault.what == OPAQUE
                    else replace(known, fault=b.fault)
                    for a, b, known in zip(before, after, rough)
                ]
            before = merged
    return rough


def _merge(before: Fact, after: Fact) -> Fact:
    """Merges the facts of a loop's variable `before` and `after` a round of the body."""
    is_mean = before == SHARED and after.is_value and after.degree == 0
    return after if before.zero or is_mean or after.fault and not before.fault else before


_CALLS: dict[str, Callable[[Op], list[Fact]]] = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), lambda op: (
        _returned(op, "f", op.facts) or [_row_by_row(op)])[0]),
    **dict.fromkeys(("If", "StatelessIf"), _decide("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), _decide("branches")),
    "While": _loop, "StatelessWhile": _loop,
}
