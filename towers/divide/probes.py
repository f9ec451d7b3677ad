"""Finds the sizes of tensors with TensorFlow's own shape inference, at a few sizes of the batch.

    probe                   0       1       2     3
    rows                10080   20160      12 10080    a size that grows like these counts rows
    other open sizes    23...   23...   23... 521...   a size that grows like these does not

The graph is imported once for each probe. No kernel runs but for small integers.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from towers.divide.facts import Op, Value
from towers.machine.tensorflow_internals import COLOCATION, evaluated

ROWS = (10080, 20160, 12, 10080)  # 10080 has many divisors: steps may reshape rows into groups
_OPEN = [(23, 23, 23, 521), (29, 29, 29, 541), (31, 31, 31, 557), (37, 37, 37, 563)]  # by axis
Dim = tuple[int, ...]  # a size at each probe
_LARGEST = 4096  # elements of an integer tensor that is evaluated


def is_rows(dim: Dim) -> bool:
    """Returns whether a size is a multiple of the number of rows, whatever that number is."""
    factors = [size // count for size, count in zip(dim, ROWS)]
    is_multiple = all(size % count == 0 for size, count in zip(dim, ROWS))
    return is_multiple and factors[0] == factors[1] == factors[2] > 0


def rows_each(dim: Dim) -> int | None:
    """Returns how many entries of a row axis each example has; None if it is not a constant."""
    factors = {size // count for size, count in zip(dim, ROWS)}
    return factors.pop() if is_rows(dim) and len(factors) == 1 else None


def is_fixed(dim: Dim) -> bool:
    """Returns whether a size does not depend on the number of rows."""
    return len(set(dim[:3])) == 1


class Probes:
    """Holds the graphs of the probes, which grow as the trace is read."""

    def __init__(self) -> None:
        self._graphs = [tf.Graph() for _ in ROWS]
        self._tensors: dict[Value, list[tf.Tensor]] = {}
        self.dims = cache(self._dims)
        self.values = cache(self._values)

    def feed(self, value: Value, shapes: Sequence[Any] | None) -> None:
        """Adds a value that is not computed here; shapes: one for each probe, or None."""
        shapes = shapes or [None] * len(ROWS)
        tensors = []
        for graph, shape in zip(self._graphs, shapes, strict=True):
            with graph.as_default():
                tensors.append(tf.compat.v1.placeholder(value.dtype, shape))
        self._tensors[value] = tensors

    def feed_rows(self, value: Value) -> None:
        """Adds rows of the batch, along axis 0."""
        self.feed(value, [
            [count, *(_OPEN[axis % 4][k] if n is None else n for axis, n in enumerate(value.shape[1:]))]
            for k, count in enumerate(ROWS)
        ] if value.shape.rank else None)  # fmt: skip

    def feed_numbers(self, value: Value, numbers: Sequence[int]) -> None:
        """Adds an integer whose values at the probes are known."""
        self._tensors[value] = []
        for graph, number in zip(self._graphs, numbers, strict=True):
            with graph.as_default():
                self._tensors[value].append(tf.constant(number, value.dtype))

    def feed_static(self, value: Value) -> None:
        """Adds a value of whose shape the trace knows what is to be known."""
        self.feed(value, [value.shape] * len(ROWS))

    def alias(self, value: Value, source: Value) -> None:
        """Adds a value that equals another one."""
        self._tensors[value] = self._tensors[source]

    def __contains__(self, value: Value) -> bool:
        """Whether a value has been added."""
        return value in self._tensors

    def shapes(self, value: Value) -> list[tf.TensorShape]:
        """Returns the shapes at the probes."""
        return [tensor.shape for tensor in self._tensors[value]]

    def extend(self, ops: Sequence[Op]) -> None:
        """Adds operations that read values which are known already."""
        definition = tf.compat.v1.GraphDef()
        own = {value for op in ops for value in op.outputs}
        known: dict[str, Value] = {}
        for op in ops:
            if op.type == "ReadVariableOp":
                self.feed_static(op.outputs[0])
                own.discard(op.outputs[0])
                continue
            node = definition.node.add()
            node.CopyFrom(op.source.node_def)
            node.name, node.device = op.name, ""
            del node.input[:]
            for attribute in (COLOCATION, "_output_shapes"):
                node.attr.pop(attribute, None)
            for value in op.inputs:
                node.input.append(value.name)
                if value not in own:
                    known[value.name] = value
        outputs = [value for op in ops for value in op.outputs if value in own]
        found = []
        for k, graph in enumerate(self._graphs):
            feeds = {name: self._tensors[value][k] for name, value in known.items()}
            with graph.as_default():
                found.append(tf.graph_util.import_graph_def(
                    definition, input_map=feeds, name="",
                    return_elements=[value.name for value in outputs],
                ) or [])  # fmt: skip
        self._tensors.update(
            {value: list(each) for value, each in zip(outputs, zip(*found, strict=True))}
        )

    def _dims(self, value: Value) -> list[Dim] | None:
        """Returns the size of each axis at the probes, or None if one is not known."""
        shapes = self.shapes(value)
        if not all(s.is_fully_defined() for s in shapes) or len({s.rank for s in shapes}) > 1:
            return None
        return list(zip(*(shape.as_list() for shape in shapes)))

    def _values(self, value: Value) -> list[Any] | None:
        """Returns an integer tensor at the probes, or None if it follows from more than shapes."""
        found = []
        for tensor in self._tensors[value]:
            constant = tf.get_static_value(tensor)
            if constant is None and (tensor.shape.num_elements() or 0) <= _LARGEST:
                constant = evaluated(tensor)
            if constant is None:
                return None
            found.append(constant)
        return found

    def const(self, value: Value) -> Any:
        """Returns an integer tensor that is the same at all probes, or None."""
        found = self.values(value)
        if found is None or any(not np.array_equal(found[0], other) for other in found[1:]):
            return None
        return found[0]
