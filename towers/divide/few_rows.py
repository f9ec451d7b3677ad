"""Finds sizes that are the same at all probes, and others in a batch of few rows.

    rows     10080    20160       12        1
    x[:6]        6        6        6        1    <-- no constant

A size that the trace leaves open, and that the probes show as a constant, is trusted only if
TensorFlow infers the same size for one row. A size in doubt puts in doubt all that it is used for.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from towers.divide.facts import Op, Value
from towers.machine.tensorflow_internals import COLOCATION

_NODE = "of_one_row"
Sizes: TypeAlias = list[int | None]  # of one row; None is unknown


class Doubts:
    """Holds which sizes and integers may be others in a batch of few rows."""

    def __init__(
        self, even: Callable[[Value], Sizes | None], number: Callable[[Value], np.ndarray | None]
    ) -> None:
        """
        even: gives the sizes that a value has for one row if they grow evenly, as at the probes.
        number: gives an integer for one row that follows from shapes, and is not in doubt.
        """
        self._even, self._number = even, number
        self._sizes: dict[Value, Sizes] = {}
        self._numbers: set[Value] = set()

    def sizes(self, value: Value) -> Sizes | None:
        """Returns the sizes of a value for one row if one of them is in doubt; else None."""
        return self._sizes.get(value)

    def is_number_in_doubt(self, value: Value) -> bool:
        """Returns whether an integer may be another one."""
        return value in self._numbers

    def alias(self, value: Value, source: Value) -> None:
        """Notes a value that equals another one."""
        if source in self._sizes:
            self._sizes[value] = self._sizes[source]
        if source in self._numbers:
            self._numbers.add(value)

    def reject(self, value: Value, axes: Sequence[int], rank: int) -> None:
        """Notes that sizes of a value are not known at all."""
        sizes = list(self._sizes.get(value) or self._even(value) or [None] * rank)
        for axis in axes:
            sizes[axis] = None
        self._sizes[value] = sizes

    def refuses(self, op: Op) -> bool:
        """Returns whether TensorFlow refuses an operation for one row."""
        return _imported_sizes(self._definition(op), 0) is None

    def note(self, op: Op, constants: Sequence[Sequence[bool] | None]) -> None:
        """Looks at what an operation makes, after the operations before it.

        constants: for each result, whether each of its sizes is the same at all probes; None if the
            probes do not know one.
        """
        is_behind = any(v in self._sizes or v in self._numbers for v in op.inputs)
        for value, are_constant in zip(op.outputs, constants, strict=True):
            if are_constant is not None:
                known = value.shape if value.shape.rank is not None else [None] * len(are_constant)
                pairs = zip(known, are_constant, strict=True)
                self._compare(value, [n is None and (is_behind or told) for n, told in pairs])
        if is_behind or not self._sizes.keys().isdisjoint(op.outputs):
            self._numbers.update(value for value in op.outputs if not value.dtype.is_floating)

    def _compare(self, value: Value, in_doubt: Sequence[bool]) -> None:
        """Compares sizes that grow evenly with those that TensorFlow infers for one row."""
        even = self._even(value) if any(in_doubt) else None
        if even is not None:
            found = self._inferred(value, len(even))
            sizes = [f if told else n for told, f, n in zip(in_doubt, found, even, strict=True)]
            if sizes != even:
                self._sizes[value] = sizes

    def _inferred(self, value: Value, rank: int) -> Sizes:
        """Returns the sizes that TensorFlow infers from an operation's inputs for one row."""
        sizes = _imported_sizes(self._definition(value.op), value.index)
        return list(sizes) if sizes is not None and len(sizes) == rank else [None] * rank

    def _definition(self, op: Op) -> bytes:
        """Returns a graph of an operation and of its inputs for one row."""
        given = [self._input(value, f"given_{i}") for i, value in enumerate(op.inputs)]
        node = node_of(op, _NODE, [each.name for each in given])
        definition = tf.compat.v1.GraphDef(node=[*given, node])
        definition.versions.producer = tf.version.GRAPH_DEF_VERSION  # else [] is an unknown shape
        return definition.SerializeToString(deterministic=True)

    def _input(self, value: Value, name: str) -> tf.compat.v1.NodeDef:
        """Returns the node of an input: an integer that is known, or a shape."""
        number = self._number(value)
        if number is not None:
            return given_node(name, value, number=number)
        sizes = self._sizes.get(value) or self._even(value)
        return given_node(name, value, value.shape if sizes is None else tf.TensorShape(sizes))


@lru_cache(4096)  # layers of equal form have equal operations
def _imported_sizes(definition: bytes, index: int) -> tuple[int | None, ...] | None:
    """Returns the sizes of a result of the node `_NODE`, or None if TensorFlow refuses it."""
    nodes = tf.compat.v1.GraphDef.FromString(definition)
    with tf.Graph().as_default():
        try:
            names = [f"{_NODE}:{index}"]
            (tensor,) = tf.graph_util.import_graph_def(nodes, {}, names, name="")
        except (ValueError, tf.errors.InvalidArgumentError):
            return None
    return None if tensor.shape.rank is None else tuple(tensor.shape)


def given_node(
    name: str, value: Value, shape: tf.TensorShape = tf.TensorShape(None),
    number: int | np.ndarray | None = None,
) -> tf.compat.v1.NodeDef:  # fmt: skip
    """Returns a node that gives a value of a shape, or a number."""
    node = tf.compat.v1.NodeDef(name=name, op="Placeholder" if number is None else "Const")
    node.attr["dtype"].type = value.dtype.as_datatype_enum
    if number is None:
        node.attr["shape"].shape.CopyFrom(shape.as_proto())
    else:
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(number, value.dtype))
    return node


def node_of(op: Op, name: str, inputs: Sequence[str]) -> tf.compat.v1.NodeDef:
    """Returns an operation of the trace as a node with another name and other inputs."""
    node = op.source.node_def
    node.name, node.device = name, ""
    node.input[:] = inputs
    for attribute in (COLOCATION, "_output_shapes"):
        node.attr.pop(attribute, None)
    return node
