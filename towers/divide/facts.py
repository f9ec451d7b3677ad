"""Names what is known of a tensor of the traced step, and how an operation in a tower reads it.

fact    where the value is                                     how it arises
once    one value, on the parameter device                     parameters, sums, all else
rows    each tower holds its own rows, along an axis           the batch; row by row
blocks  the same, but its rows are in each of several blocks   dilated convolutions
part    each tower holds a part; the sum of the parts is it    sums over rows
each    each tower holds a value of its own                    means of batch_norm="average"
size    follows from shapes and constants; made where needed   tf.shape(x)[0], constants
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

Tensors: TypeAlias = list[tf.Tensor]  # values of operations in one graph, in order
Shapes: TypeAlias = Sequence[tf.TensorShape]  # at the probes, or what makes tf.TensorShapes


class Fact(NamedTuple):
    """Says where a tensor's value is. A TensorList has the fact of its elements.

    axis: the axis of the rows; -1 for other kinds. num_blocks: the number of blocks behind each
        other along the axis, of which each holds something of every row of the batch.
    """

    kind: str
    axis: int = -1
    num_blocks: int = 1

    @property
    def has_rows(self) -> bool:
        """Whether each tower holds its own rows."""
        return self.kind in ("rows", "blocks")


ONCE, PART, SIZE = Fact("once"), Fact("part"), Fact("size")
EACH = Fact("each")
EMPTY = Fact("empty")  # a TensorList without elements yet
SIZES = Fact("sizes")  # a TensorList whose elements are all the same size
SAME = Fact("same")  # a TensorList whose elements are all one value from outside of all loops


def rows(axis: int) -> Fact:
    """Returns the fact of a tensor whose rows lie along an axis."""
    return Fact("rows", axis)


def blocks(count: int) -> Fact:
    """Returns the fact of a tensor with several blocks of rows, one behind the other on axis 0."""
    return Fact("blocks", 0, count)


class Need(NamedTuple):
    """How an operation in a tower reads an input.

    kind: "whole" is the batch's value. "own" is the tower's value, rows or a part, as it is. "rows"
        is the tower's rows along an axis of a whole value. "part" is the whole value in the first
        tower and zeros in the others. "shape" is a shape whose entry at an axis is the tower's.
    """

    kind: str
    axis: int = -1


WHOLE, OWN, AS_PART = Need("whole"), Need("own"), Need("part")


def rows_of(axis: int) -> Need:
    """Returns the need for a tower's rows along an axis."""
    return Need("rows", axis)


def shape_of(axis: int) -> Need:
    """Returns the need for a shape whose entry at an axis counts the tower's rows."""
    return Need("shape", axis)


class Elements(NamedTuple):
    """Holds what is known about the elements of a TensorList.

    shapes: the shape of each element at the probes. number: the number of elements at the probes.
    source: the size, or the value from outside of all loops, that each element equals. None is
        unknown.
    """

    shapes: Shapes | None = None
    number: Sequence[int] | None = None
    source: "Value | None" = None


@dataclass(eq=False, repr=False)  # a graph of operations has no end
class Value:
    """A tensor of the flattened trace.

    shape: the shape in the trace; a None is a size that may change from batch to batch.
    elements: known facts about the elements, if it is a TensorList.
    rows_each: entries of the axis of rows for each example, once a shape has been read.
    is_outside: whether it is made outside of all loops and conditions.
    below: integers are 0 or more, and below these sizes at the probes.
    formula: for a size, integer arrays (a, b) if it is a + b * the number of rows for all batches.
    """

    op: "Op"
    index: int
    dtype: tf.DType
    shape: tf.TensorShape
    fact: Fact = ONCE
    elements: Elements = Elements()
    rows_each: int | None = None
    below: Sequence[int] | None = None
    formula: tuple[np.ndarray, np.ndarray] | None = None
    is_outside: bool = False

    @property
    def name(self) -> str:
        """The name in the probe graphs."""
        return f"{self.op.name}:{self.index}"


@dataclass(eq=False, repr=False)
class Op:
    """An operation of the flattened trace. Operations are numbered in the order of the trace.

    source: the traced operation, which has the attributes and the user's line.
    in_towers: how every tower runs it; None: it runs once.
    path: the name of the source, behind the names of the calls that it is in.
    needs_xla: whether it is a convolution that XLA compiles, because TensorFlow has no kernel.
    """

    name: str
    type: str
    source: tf.Operation
    inputs: list[Value]
    outputs: list[Value]
    in_towers: "Each | None" = None
    path: str = ""
    needs_xla: bool = False

    @property
    def states(self) -> list[Value]:
        """The variables and other resources that the operation reads or changes."""
        return [value for value in self.inputs if value.dtype == tf.resource]

    @property
    def is_made_where_read(self) -> bool:
        """Whether the results are sizes, which every reader makes for itself."""
        answer = self.in_towers
        return answer is not None and answer.facts[0] == SIZE and not answer.needs

    @property
    def is_stateful(self) -> bool:
        """Whether the operation reads or changes a state, prints, checks or calls Python."""
        return bool(self.source.op_def.is_stateful)


@dataclass
class Each:
    """Says that an operation runs in every tower.

    needs: the values that it reads, usually one for each input.
    facts: one for each output.
    emit: makes the tower's outputs of the tower's context and the needed values; None: a copy.
    shapes, elements: one for each output that TensorFlow's shape inference does not know.
    """

    needs: list[tuple[Value, Need]]
    facts: list[Fact]
    emit: Callable[[Any, "Op", Tensors], Sequence[tf.Tensor | None]] | None = None
    shapes: Sequence[Shapes | None] | None = None
    elements: list[Elements] | None = None
