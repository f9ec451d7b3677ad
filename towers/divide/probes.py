"""Finds the sizes of tensors with TensorFlow's own shape inference, at a few sizes of the batch.

    probe                   0       1       2        3       4
    rows                10080   20160      12    10080   10080    what grows like these counts rows
    other open sizes    23...   23...   23... 20011...    1...    what grows like these does not

The graph is imported once for each probe; without other open sizes, the last two equal the first.
No kernel runs but for small integers. `few_rows` finds what these probes do not show.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import tensorflow as tf

from towers.divide.facts import Op, Shapes, Value
from towers.divide.few_rows import Doubts, given_node, node_of
from towers.divide.flat import inputs_of, outputs_of
from towers.machine.tensorflow_internals import evaluated
from towers.step.structures import RowComponents

# 10080 has many divisors: steps may reshape rows into groups.
ROWS = (10080, 20160, 12, 10080, 10080)
_OPEN = [(23, 20011), (29, 20021), (31, 20023), (37, 20029)]  # by axis: at probes 0 to 2, at 3
# Open sizes at probe 4, tried in turn until TensorFlow refuses no operation for them. A convolution
# needs a few steps. 0: each input has another one; x + y refuses them. -1: the sizes of probe 0.
SHORT = (0, 1, 2, 4, 8, 16, -1)
Dim = tuple[int, ...]  # a size at each probe
_LARGEST = 4096  # elements of an integer tensor that is evaluated
_LARGE_BOUNDS = range(ROWS[0] // 2, 2**31 - 1)  # of a slice in code: a batch may go beyond it
# These never round a size. Others may, such as x[::2], and then n + 1 rows look like n rows.
_EXACT = frozenset(
    """BatchToSpaceND BroadcastTo ConcatV2 Fill MirrorPad Pad PadV2 Reshape ScatterNd Slice
    SpaceToBatchND Split SplitV StatelessRandomNormalV2 StatelessRandomUniformFullIntV2
    StatelessRandomUniformIntV2 StatelessRandomUniformV2 StatelessTruncatedNormalV2
    StridedSliceGrad Tile UnsortedSegmentSum""".split()
)


def is_rows(dim: Dim) -> bool:
    """Returns whether a size is a multiple of the number of rows, whatever that number is."""
    factors = [size // count for size, count in zip(dim, ROWS)]
    is_multiple = all(size % count == 0 for size, count in zip(dim, ROWS))
    return is_multiple and factors[0] == factors[1] == factors[2] > 0


def rows_each(dim: Dim) -> int | None:
    """Returns how many entries of a row axis each example has; None if it is not a constant."""
    factors = {size // count for size, count in zip(dim, ROWS)}
    if is_rows(dim) and len(factors) == 1:
        return factors.pop()
    return None


def is_fixed(dim: Sequence[object]) -> bool:
    """Returns whether a size does not depend on the number of rows."""
    return len(set(dim[:3])) == 1


class ShortRefused(Exception):
    """Open sizes at probe 4 do not suit an operation."""


class Probes:
    """Holds the graphs of the probes, which grow as the trace is read.

    short: the open sizes at probe 4, one of `SHORT`.
    """

    def __init__(self, short: int = SHORT[0]) -> None:
        self._short = short
        self._graphs = [tf.Graph() for _ in ROWS]
        self._tensors: dict[Value, list[tf.Tensor]] = {}
        self._shapes: dict[Value, list[tf.TensorShape]] = {}  # of values that no graph computes
        self._numbers: dict[Value, Sequence[int | np.ndarray]] = {}
        self._num_imports = 0
        self._has_open = False  # sizes besides the number of rows
        self.dims = cache(self._dims)
        self.values = cache(self._values)
        self.formula = cache(self._formula)
        self._doubts = Doubts(self._even_sizes, self._number_of_one_row)

    def feed(self, value: Value, shapes: Shapes | None) -> None:
        """Adds a value that is not computed here; shapes: one for each probe, or None."""
        known = [None] * len(ROWS) if shapes is None else shapes
        self._shapes[value] = [tf.TensorShape(shape) for shape in known]

    def feed_inputs(self, inputs: Sequence[Value], batch: RowComponents) -> None:
        """Adds the inputs of the trace; batch: which of them tell the number of rows."""
        self._has_open = bool(batch.row_splits)  # the length of the longest row
        for i, value in enumerate(inputs):
            if i in batch.dense:
                self.feed(value, self._shapes_of_rows(value.shape, i))
            elif i in batch.row_splits:
                self.feed(value, [[count + 1] for count in ROWS])
            elif i in batch.dense_shapes:
                shapes = self._shapes_of_rows(batch.dense_shapes[i], i)
                self.feed_numbers(value, list(map(np.array, shapes)))
            else:
                self.feed_static(value)

    def _shapes_of_rows(self, shape: tf.TensorShape, i: int) -> list[list[int]]:
        """Returns the shapes at the probes of input i of the batch, with rows along axis 0."""
        sizes = [*enumerate(shape[1:] if shape.rank else [])]
        found = [
            [count, *(self._open_size(axis, k, i) if n is None else n for axis, n in sizes)]
            for k, count in enumerate(ROWS)
        ]
        self._has_open |= found[0] != found[3]
        return found

    def open_sizes(self) -> Dim | None:
        """Returns a size that does not count rows, and changes from batch to batch, if any do."""
        if not self._has_open:
            return None
        return tuple(self._open_size(0, k) for k in range(len(ROWS)))

    def _open_size(self, axis: int, k: int, i: int = 0) -> int:
        """Returns a size of input i that changes without the number of rows, at probe k."""
        if k == 4 and self._short != SHORT[-1]:
            return self._short or i + 1
        return _OPEN[axis % len(_OPEN)][k == 3]

    def feed_numbers(self, value: Value, numbers: Sequence[int | np.ndarray]) -> None:
        """Adds integers whose values at the probes are known."""
        self.feed(value, [np.shape(number) for number in numbers])
        self._numbers[value] = numbers

    def feed_static(self, value: Value) -> None:
        """Adds a value of whose shape the trace knows what is to be known."""
        self.feed(value, [value.shape] * len(ROWS))

    def alias(self, value: Value, source: Value) -> None:
        """Adds a value that equals another one."""
        if source in self._tensors:
            self._tensors[value] = self._tensors[source]
        else:
            self._shapes[value] = self._shapes[source]
        if source in self._numbers:
            self._numbers[value] = self._numbers[source]
        self._doubts.alias(value, source)

    def __contains__(self, value: Value) -> bool:
        """Whether a value has been added."""
        return value in self._tensors or value in self._shapes

    def shapes(self, value: Value) -> list[tf.TensorShape]:
        """Returns the shapes at the probes.

        At probe 2, a size in doubt is replaced by that of one row. So it is taken neither for a
        constant nor for a number of rows.
        """
        in_doubt, shapes = self._doubts.sizes(value), self._inferred(value)
        if in_doubt is not None:
            sizes = shapes[2].as_list()
            even = self._even_sizes(value) or sizes
            for axis, (size, expected) in enumerate(zip(in_doubt, even, strict=True)):
                if size is None or size == sizes[axis] != expected:
                    sizes[axis] = None  # such as 12, the rows of the probe: nothing would differ
                elif size != expected:
                    sizes[axis] = size
            shapes[2] = tf.TensorShape(sizes)
        return shapes

    def _inferred(self, value: Value) -> list[tf.TensorShape]:
        """Returns the shapes at the probes as TensorFlow infers them."""
        if value in self._tensors:
            return [tensor.shape for tensor in self._tensors[value]]
        return list(self._shapes[value])

    def _even_sizes(self, value: Value) -> list[int | None] | None:
        """Returns the sizes for one row if they grow evenly, as at the probes."""
        dims = _dims_of(self._inferred(value))
        if dims is None:
            return None
        each = [(dim[1] - dim[0]) // (ROWS[1] - ROWS[0]) for dim in dims]
        sizes = [dim[2] - k * (ROWS[2] - 1) for dim, k in zip(dims, each, strict=True)]
        return [n if n >= 0 else None for n in sizes]

    def _number_of_one_row(self, value: Value) -> np.ndarray | None:
        """Returns an integer tensor for one row if it grows evenly."""
        formula = self.formula(value)
        return None if formula is None else np.asarray(formula[0] + formula[1])

    def extend(self, ops: Sequence[Op]) -> None:
        """Adds operations that read values which are known already.

        Values of the same size for all batches, such as an optimizer's slots, need no inference.
        """
        kept = []
        for op in ops:
            if op.type == "ReadVariableOp" or all(map(_has_known_size, op.outputs)):
                for value in op.outputs:
                    self.feed_static(value)
            else:
                kept.append(op)
        self._infer(kept)

    def _infer(self, kept: list[Op]) -> None:
        """Lets TensorFlow infer shapes. If it refuses an operation, the trace's shapes remain.

        It refuses, for example, the diagonal of a matrix of which it knows too little.
        """
        if not kept:
            return
        found = self._import(kept, range(len(ROWS)))
        if found is not None:
            self._tensors.update(
                zip(outputs_of(kept), map(list, zip(*found, strict=True)), strict=True)
            )
            for op in kept:
                self._note_doubts(op)
        elif len(kept) == 1:
            for value in kept[0].outputs:
                self.feed_static(value)
        else:
            half = len(kept) // 2
            self._infer(kept[:half])
            self._infer(kept[half:])

    def _note_doubts(self, op: Op) -> None:
        """Looks for sizes of results that may be others than the probes tell."""
        dims = [_dims_of(self._inferred(value)) for value in op.outputs]
        constants = [None if d is None else [len(set(dim)) == 1 for dim in d] for d in dims]
        self._doubts.note(op, constants)
        for value, sizes in zip(op.outputs, dims, strict=True):
            if sizes is not None and not value.shape.is_fully_defined():
                if axes := self._unsure_axes(op, sizes):
                    self._doubts.reject(value, axes, len(sizes))

    def _unsure_axes(self, op: Op, dims: Sequence[Dim]) -> list[int]:
        """Returns the axes of a result whose sizes a larger or an odd batch may not follow."""
        if op.type == "StridedSlice" and self._has_large_bound(op):
            return list(range(len(dims)))
        if all(map(_is_linear, dims)) or op.type in _EXACT:
            return []
        if op.type == "Range" and tf.get_static_value(op.source.inputs[2]) == 1:
            return []
        known = {dim for v in op.inputs for dim in _dims_of(self._inferred(v)) or ()}
        return [a for a, dim in enumerate(dims) if not _is_linear(dim) and dim not in known]

    def _has_large_bound(self, op: Op) -> bool:
        """Returns whether a slice along rows has a bound in code that a batch may go beyond."""
        dims = _dims_of(self._inferred(op.inputs[0])) or []
        for bound in op.inputs[1:3]:
            for entry, dim in zip(zip(*(self.values(bound) or ())), dims):
                is_literal = len(set(entry)) == 1 and abs(int(entry[0])) in _LARGE_BOUNDS
                if is_literal and not is_fixed(dim):
                    return True
        return False

    def has_fixed_batch(self, op: Op) -> bool:
        """Returns whether an operation that runs once works for one batch size alone.

        It has rows, its result has a fixed size, and TensorFlow refuses it for many rows, and for
        12 rows or for one. For few rows, it refuses others, too, such as the search for the largest
        16; for many rows, the padding to 64 rows.
        """
        has_rows = any(value.fact.has_rows for value in op.inputs)
        if not has_rows or not op.outputs:
            return False
        is_fixed_size = all(value.shape.num_elements() for value in op.outputs)
        if not is_fixed_size or self._import([op], [0]) is not None:
            return False
        return self._import([op], [2]) is None or self._doubts.refuses(op)

    def _import(self, kept: list[Op], probes: Sequence[int]) -> list[list[tf.Tensor]] | None:
        """Adds operations to graphs of some probes; returns their outputs in each graph.

        Returns None if TensorFlow refuses an operation.
        """
        outputs = outputs_of(kept)
        added = set(outputs)
        outside = set(inputs_of(kept)) - added
        names = {  # a value that no graph computes becomes a placeholder of this import
            value: f"{value.op.name}_{value.index}_{kept[0].name}"
            for value in outside
            if value not in self._tensors
        }
        definition = tf.compat.v1.GraphDef()
        for op in kept:
            inputs = [names.get(value, value.name) for value in op.inputs]
            definition.node.append(node_of(op, op.name, inputs))
        computed = [value for value in outside if value in self._tensors]
        self._num_imports += 1  # names in a graph must differ, also after an import that failed
        imported: list[list[tf.Tensor]] = []
        for k in probes:
            if k >= 3 and not self._has_open:
                imported.append(imported[0])
                continue
            mine = tf.compat.v1.GraphDef(node=[self._fed(v, k, name) for v, name in names.items()])
            mine.MergeFrom(definition)
            mine.versions.producer = tf.version.GRAPH_DEF_VERSION  # else [] is an unknown shape
            feeds = {value.name: self._tensors[value][k] for value in computed}
            results, name = [value.name for value in outputs], f"import_{self._num_imports}"
            with self._graphs[k].as_default():
                try:
                    tensors = tf.graph_util.import_graph_def(mine, feeds, results, name=name)
                except (ValueError, tf.errors.InvalidArgumentError):
                    if k == 4:
                        raise ShortRefused from None
                    return None
            imported.append(tensors or [])
        return imported

    def _fed(self, value: Value, k: int, name: str) -> tf.compat.v1.NodeDef:
        """Returns the node of a value that no graph computes, at probe k."""
        if value in self._numbers:
            return given_node(name, value, number=self._numbers[value][k])
        return given_node(name, value, self._shapes[value][k])

    def _dims(self, value: Value) -> list[Dim] | None:
        """Returns the size of each axis at the probes, or None if one is not known."""
        return _dims_of(self.shapes(value))

    def rows_axis(self, value: Value) -> int | None:
        """Returns the axis that counts rows, if no other axis depends on their number."""
        dims = self.dims(value) or []
        found = [axis for axis, dim in enumerate(dims) if not is_fixed(dim)]
        if len(found) == 1 and is_rows(dims[found[0]]):
            return found[0]
        return None

    def _values(self, value: Value) -> list[np.ndarray] | None:
        """Returns an integer tensor at the probes, or None if it follows from more than shapes."""
        if self._doubts.is_number_in_doubt(value):
            return None
        if value in self._numbers:
            return [np.array(number) for number in self._numbers[value]]
        if value not in self._tensors:
            return None
        arrays = []
        for tensor in self._tensors[value]:
            array = _constant(tensor)
            if array is None:
                return None
            arrays.append(array)
        return arrays

    def const(self, value: Value) -> np.ndarray | None:
        """Returns an integer tensor that is the same at all probes, or None."""
        found = self.values(value)
        if found is None or any(not np.array_equal(found[0], other) for other in found[1:]):
            return None
        return found[0]

    def _formula(self, value: Value) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns arrays (a, b) if an integer tensor is a + b * the number of rows, or None."""
        arrays = self.values(value)
        if arrays is None or value.dtype not in (tf.int32, tf.int64):
            return None
        if len({array.shape for array in arrays}) > 1:
            return None
        slope, remainder = np.divmod(arrays[1] - arrays[0], ROWS[1] - ROWS[0])
        start = arrays[0] - slope * ROWS[0]
        is_linear = not remainder.any() and np.array_equal(start + slope * ROWS[2], arrays[2])
        if is_linear:
            return (start, slope)
        return None

    def is_divisible(self, size: Value, divisor: Value) -> bool:
        """Returns whether a division leaves no remainder, whatever the number of rows."""
        parts, number = self.formula(size), self.const(divisor)
        if parts is None or number is None or not np.all(number):
            return False
        return not any(np.any(part % number) for part in parts)


@lru_cache(4096)
def _is_linear(dim: Dim) -> bool:
    """Returns whether a size is a + b * the number of rows, for integers a and b."""
    slope, rest = divmod(dim[1] - dim[0], ROWS[1] - ROWS[0])
    return rest == 0 and dim[0] + slope * (ROWS[2] - ROWS[0]) == dim[2]


def _dims_of(shapes: Shapes) -> list[Dim] | None:
    if not all(s.is_fully_defined() for s in shapes) or len({s.rank for s in shapes}) > 1:
        return None
    return list(zip(*(shape.as_list() for shape in shapes)))


def _constant(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns a small integer tensor of a probe, or None if it follows from more than shapes."""
    if (tensor.shape.num_elements() or 0) > _LARGEST:
        return None
    constant = tf.get_static_value(tensor)
    if constant is None:
        return evaluated(tensor)
    return constant


def _has_known_size(value: Value) -> bool:
    return bool(value.dtype.is_floating and value.shape.is_fully_defined())
