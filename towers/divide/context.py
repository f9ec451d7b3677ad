"""Emits operations of the trace into the graph of one tower, or on whole values."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.divide.facts import (
    AS_PART,
    ONCE,
    OWN,
    PART,
    SIZE,
    WHOLE,
    Need,
    Op,
    Tensors,
    Value,
    rows,
)
from towers.divide.repeatable import SUMS, calls_functions, draws, in_order
from towers.machine.tensorflow_internals import copied


class Place(NamedTuple):
    """Holds the place of a tower's rows in the batch, as int32 scalars.

    count: the number of the tower's rows. start: the number of rows before them. total: the
        number of rows of the batch.
    """

    count: tf.Tensor
    start: tf.Tensor
    total: tf.Tensor
    has_rows: tf.Tensor


class Context:
    """Holds values of the trace in one graph, and emits operations that read them.

    place: the place of the tower's rows; for whole values, of all rows.
    find: gives values that are not emitted here.
    """

    def __init__(
        self, place: Place, find: Callable[[Value, Need], tf.Tensor],
        agree: Callable[[Tensors], Tensors] = list,
        emit_once: "Callable[[Context, Op], list[tf.Tensor | None]] | None" = None,
    ) -> None:  # fmt: skip
        """
        agree: returns values as all workers have them, given what one of them has drawn.
        emit_once: emits what runs once. Default: `once`.
        """
        self.place, self._find, self._agree = place, find, agree
        self._emit_once = emit_once or Context.once
        self.values: dict[Value, tf.Tensor] = {}
        self._by_formulas: dict[tuple, tf.Tensor] = {}  # sizes of the batch and of this tower
        self._drawn: set[Value] = set()  # lists that workers agree on when they are read

    def inside(self, place: Place, find: Callable[[Value, Need], tf.Tensor]) -> "Context":
        """Returns a context for a function that this context's graph calls."""
        return Context(place, find, emit_once=self._emit_once)

    def copy(self, op: Op, inputs: Sequence[tf.Tensor], **attributes: int | tf.DType) -> Tensors:
        """Copies an operation; integers and types among its attributes may be replaced.

        A sum of many values, which would begin with the one that is ready first, gets an order.

               gradient of the convolution's output
                      |                |
                   identity            |        without it, TensorFlow joins the two below into one
                      |                |        oneDNN operation on CPUs, which takes longer than
                 BiasAddGrad   Conv2DBackpropFilter                                         both
        """
        if op.type == "BiasAddGrad":
            inputs = [tf.identity(inputs[0])]
        if op.type in SUMS:
            return [functools.reduce(lambda a, b: tf.raw_ops.AddN(inputs=[a, b]), inputs)]
        replaced = {name: _attribute(value) for name, value in attributes.items()}

        def one_operation(*given: tf.Tensor) -> Tensors:
            return copied(op.source, list(given), replaced)

        if op.needs_xla:
            return tf.function(one_operation, autograph=False, jit_compile=True)(*inputs)
        return one_operation(*inputs)

    def run(self, ops: Iterable[Op]) -> None:
        """Emits operations in a tower, with those on whole values, such as a loop's counter."""
        for op in ops:
            if op.is_made_where_read:
                continue
            if op.in_towers is None:
                outputs = self._emit_once(self, op)
            else:
                given = [self.read(value, need) for value, need in op.in_towers.needs]
                outputs = list((op.in_towers.emit or Context.copy)(self, op, given))
            self._keep(op, outputs)

    def _keep(self, op: Op, outputs: Sequence[tf.Tensor | None]) -> None:
        """Keeps what an operation has made."""
        for value, tensor in zip(op.outputs, outputs, strict=True):
            if tensor is not None and value.dtype != tf.variant:
                tensor.set_shape(open_shape(value))  # a copy may know less than the trace
        self.values.update(zip(op.outputs, outputs, strict=True))

    def once(self, op: Op) -> Tensors:
        """Emits an operation on whole values."""
        inputs = [self.read(value, WHOLE) for value in op.inputs]
        if calls_functions(op.source):
            outputs = copied(op.source, inputs, in_order(op.source))
        else:
            outputs = self.copy(op, inputs)
        is_drawn = op.is_stateful and draws(op.source)
        if not is_drawn and self._drawn.isdisjoint(op.inputs):
            return outputs
        self._drawn.update(value for value in op.outputs if value.dtype == tf.variant)
        return self._agree(outputs)

    def read(self, value: Value, need: Need) -> tf.Tensor:
        """Returns a value as an operation needs it."""
        plain = without_change(value, need)
        if plain == OWN:
            if value in self.values:
                return self.values[value]
            return self._find(value, OWN)
        if plain == WHOLE:
            return self._whole(value)
        if plain.kind == "shape":
            return self._own_shape(value, plain.axis)
        if plain.kind == "part":
            whole = self._whole(value)
            return tf.where(tf.equal(self.place.start, 0), whole, tf.zeros_like(whole))
        if value.fact == SIZE or value in self.values:
            return self._cut(self._whole(value), plain.axis)
        return self._find(value, plain)

    def _whole(self, value: Value) -> tf.Tensor:
        """Returns a value of the batch."""
        # A formula of the number of rows needs no tensor of the towers, so it is the first choice.
        if value.fact == SIZE and value.formula is not None:
            return self._by_formula(value, is_own=False)
        if value in self.values and value.fact in (ONCE, SIZE):
            return self.values[value]
        if value.fact == SIZE and value.op.is_made_where_read:
            self._emit_size(value.op)
            return self.values[value]
        return self._find(value, OWN if value.fact == SIZE else WHOLE)

    def _cut(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns the tower's rows of a whole value."""
        each = tf.shape(whole)[axis] // self.place.total
        indices = each * self.place.start + tf.range(each * self.place.count)
        return tf.gather(whole, indices, axis=axis)

    def _by_formula(self, size: Value, is_own: bool) -> tf.Tensor:
        """Returns what a size is for the rows of the tower, or of the batch."""
        assert size.formula is not None
        start, slope = size.formula
        # Most shapes of a model are the shapes of several layers. One of them is made.
        key = is_own, size.dtype, start.shape, start.tobytes(), slope.tobytes()
        if key not in self._by_formulas:
            made = tf.constant(start, size.dtype)
            if slope.any():
                if is_own:
                    count = self.place.count
                else:
                    count = self.place.total
                made += tf.constant(slope, size.dtype) * tf.cast(count, size.dtype)
            self._by_formulas[key] = made
        return self._by_formulas[key]

    def _own_shape(self, value: Value, axis: int) -> tf.Tensor:
        """Returns a shape in which the tower's rows replace the batch's rows; -1 stays."""
        if value.formula is not None:
            start, slope = value.formula
            if start[axis] == -1 or np.flatnonzero(slope).tolist() == [axis] and start[axis] == 0:
                return self._by_formula(value, is_own=True)
        shape = self._whole(value)
        total = tf.cast(self.place.total, shape.dtype)
        count = tf.cast(self.place.count, shape.dtype)
        is_rows = tf.logical_and(tf.one_hot(axis, tf.size(shape), True, False), shape >= 0)
        return tf.where(is_rows, shape // total * count, shape)

    def _emit_size(self, op: Op) -> None:
        """Emits an operation whose result follows from shapes and constants."""
        if op.type in ("Shape", "Size"):
            outputs = [self._shape(op, value, out) for value, out in zip(op.inputs, op.outputs)]
        else:
            outputs = self.copy(op, [self._whole(value) for value in op.inputs])
        self.values.update(zip(op.outputs, outputs, strict=True))

    def _shape(self, op: Op, value: Value, out: Value) -> tf.Tensor:
        """Returns the shape, or the size, of the batch's value."""
        sizes: list[int | tf.Tensor | None] = value.shape.as_list()
        if value.fact.has_rows:
            axis, each = value.fact.axis, value.rows_each
            sizes[axis] = tf.cast(each * self.place.total, out.dtype)
        if None in sizes:  # another size that changes from batch to batch: each tower's is the same
            own = tf.shape(self.read(value, OWN), out_type=out.dtype)
            sizes = [own[axis] if size is None else size for axis, size in enumerate(sizes)]
        stacked = tf.stack([tf.cast(size, out.dtype) for size in sizes]) if sizes else (
            tf.zeros([0], out.dtype)
        )  # fmt: skip
        if op.type == "Size":
            return tf.reduce_prod(stacked)
        return stacked


def _attribute(value: int | tf.DType) -> tf.compat.v1.AttrValue:
    """Returns an AttrValue of an integer or a type."""
    found = tf.compat.v1.AttrValue()
    if isinstance(value, tf.DType):
        found.type = value.as_datatype_enum
    else:
        found.i = value
    return found


def open_shape(value: Value) -> tf.TensorShape:
    """Returns the shape of the trace, for any number of rows."""
    if not value.fact.has_rows or value.shape.rank is None or value.dtype == tf.variant:
        return value.shape
    return tf.TensorShape([None if a == value.fact.axis else n for a, n in enumerate(value.shape)])


def without_change(value: Value, need: Need) -> Need:
    """Returns OWN if what a tower has is what is needed."""
    is_own = need.kind == "rows" and value.fact == rows(need.axis)
    if is_own or need == AS_PART and value.fact == PART:
        return OWN
    return need


def reads(op: Op) -> list[tuple[Value, Need]]:
    """Returns what an operation reads: for a size, the towers' values that it follows from.

    A value that becomes a part is read as a whole.
    """
    whole = [(value, WHOLE) for value in op.inputs]
    pairs = []
    for value, need in whole if op.in_towers is None else op.in_towers.needs:
        if value.fact == SIZE:
            pairs += [(root, OWN) for root in roots(value)]
        else:
            need = without_change(value, need)
            pairs.append((value, WHOLE if need == AS_PART else need))
    return pairs


def sources(value: Value) -> list[Value]:
    """Returns what is read for a value: itself, or the tensors that a size follows from."""
    if value.fact == SIZE:
        return roots(value)
    return [value]


def roots(size: Value) -> list[Value]:
    """Returns the towers' tensors with open sizes that a size is read from."""
    tensors: list[Value] = []
    stack, seen = [size], set()
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.fact == SIZE and not value.op.is_made_where_read:
            tensors.append(value)  # a list has held it
        # Only a size that changes by the batch must be read from the tensor; N is known.
        elif value.fact != SIZE:
            open_axes = {a for a, n in enumerate(value.shape) if n is None} - {value.fact.axis}
            if open_axes:
                tensors.append(value)
        else:
            stack += value.op.inputs
    return tensors
