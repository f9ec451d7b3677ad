"""Finds in a traced graph whether the towers' values of a tensor determine the batch's value.

    loss = tf.reduce_mean(each)              a mean: weighs n_i / N
    loss = tf.nn.l2_loss(rows)               a sum: the towers' values add up
    loss = tf.sqrt(tf.reduce_mean(each))     neither: a fault, with the operation that causes it

The walk goes from a tensor back to the shard's rows. Then `rules` derive the facts in the order of
computation, also inside of functions that the graph calls. A loop's body is followed until the
facts of its variables stay the same. In a loop over the rows, what a round reads is one row:

    tf.map_fn(lambda row: tf.norm(row), x)             one row -> one value: rows again
    tf.map_fn(lambda row: tf.norm(row - x), x)         one row with all rows: a fault
    tf.scan(lambda total, row: total + row, x)         a row's value reaches the next: a fault
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from towers.machine.tensorflow_internals import called_graphs
from towers.machine.user_lines import line_of, warn_user
from towers.graph.elements import is_number, row_by_row
from towers.graph.facts import (
    CARRIES, COUNT, ONE_LENGTH, ROWS, SHARED, UNEVEN, Fact, Fault, Op, first_fault,
    open_axis, sizes,
)
from towers.graph.rules import forgive, infer, with_padding
from towers.graph.walk import Key, follow, key_of, source


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
                fed.append((leaf.row_splits, replace(fact, numbers="splits")))
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
            warn_user(message)
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
                for output, fact in zip(operation.outputs, found)  # a gradient adds to a function's
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
        found = [_choose(op, *each) for each in zip(op.operation.outputs, zip(*branches))]
        return [op.decide(fact, condition) for fact in found or _row_by_row(op)]

    return rule


def _choose(op: Op, output: tf.Tensor, facts: Sequence[Fact]) -> Fact:
    op.output = output
    return op.choose(facts)


_MOST_ROUNDS = 16  # of a loop's body, until the facts of its variables stay the same


def _loop(op: Op) -> list[Fact]:
    """Returns the facts of a loop's variables after it; follows its condition and its body.

    A loop over the rows has a counter 0, 1, ... n - 1. A round reads one row by it.
    """
    bodies, conditions = (called_graphs(op.operation, name) for name in ("body", "cond"))
    if not bodies or any(len(g.inputs) != len(op.facts) for g in [*bodies, *conditions]):
        return _row_by_row(op)
    (body,), outputs, starts = bodies, op.operation.outputs, op.facts
    counters = _counters(op, body, conditions[0])
    kept = [i for i, (v, after) in enumerate(zip(body.inputs, body.outputs)) if source(after) is v]
    facts = [
        Fact(degree=None, loop=body, numbers="own") if i in counters else fact
        for i, fact in enumerate(starts)
    ]
    for _ in range(_MOST_ROUNDS):
        (after,) = _returned(op, "body", facts)
        before, facts = facts, [
            fact if i in counters or i in kept else _choose(op, outputs[i], [fact, new])
            for i, (fact, new) in enumerate(zip(facts, after))
        ]
        if facts == before:
            break
    facts = [starts[i] if i in counters else fact for i, fact in enumerate(facts)]
    ((goes_on,),) = _returned(op, "cond", facts)
    carries = any(fact.loop is body for fact in facts)
    for i, (fact, output) in enumerate(zip(facts, outputs)):
        if i not in kept:
            if carries and fact.local:
                fact = op.faulty(replace(fact, loop=None), CARRIES)
            # A list gets an item for each row, in as many rounds as there are rows.
            is_list = output.dtype == tf.variant and fact.axis == 0 and not goes_on.local
            facts[i] = fact if is_list else op.decide(fact, goes_on)
    return facts


def _counters(op: Op, body: tf.Graph, condition: tf.Graph) -> set[int]:
    """Returns the indices of a loop's variables that count its rounds from 0 to n - 1."""

    def is_one(tensor: tf.Tensor) -> bool:
        outside = [v for v, inside in zip(op.inputs, body.inputs) if inside is source(tensor)]
        return is_number(outside[0] if outside else tensor, 1)

    counters = {
        i for i, (before, after) in enumerate(zip(body.inputs, body.outputs))
        if (end := source(after).op).type in ("Add", "AddV2") and source(end.inputs[0]) is before
        and is_one(end.inputs[1]) and op.inputs[i].shape == () and is_number(op.inputs[i], 0)
    }
    rows, compared = Rows(zip(condition.inputs, op.facts)), [condition.inputs[i] for i in counters]
    return counters if any(
        end.type == "Less" and any(source(end.inputs[0]) is v for v in compared)
        and rows.fact(end.inputs[1]).degree == 1 for end in condition.get_operations()
    ) else set()


_CALLS: dict[str, Callable[[Op], list[Fact]]] = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), lambda op: (
        _returned(op, "f", op.facts) or [_row_by_row(op)])[0]),
    **dict.fromkeys(("If", "StatelessIf"), _decide("then_branch", "else_branch")),
    **dict.fromkeys(("Case", "StatelessCase"), _decide("branches")),
    "While": _loop, "StatelessWhile": _loop,
}
