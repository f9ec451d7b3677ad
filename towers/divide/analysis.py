"""Decides for each operation of the trace whether it runs in every tower, or once.

An operation without a rule runs once, on whole values. It is exact and only slower.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import tensorflow as tf

from towers.divide import (  # noqa: F401  (rules)
    arithmetic, as_rows, composites, indices, layers, loops, own_moments, shapes,
)  # fmt: skip
from towers.divide.context import roots
from towers.divide.facts import (
    EACH, ONCE, OWN, PART, SIZE, WHOLE, Each, Elements, Fact, Op, Shapes, Value, rows,
)  # fmt: skip
from towers.divide.flat import has_effects, is_noise, new_op
from towers.divide.probes import SHORT, Dim, Probes, is_fixed, is_rows, rows_each
from towers.divide.rule import RULES, Look
from towers.step.structures import RowComponents

# These make rows of a value that has none, if their shape argument counts rows.
_MAKE_ROWS = ("BroadcastTo", "Fill", "Tile", "StatelessRandomUniformV2", "StatelessRandomNormalV2",
              "StatelessRandomUniformIntV2", "StatelessRandomUniformFullIntV2")  # fmt: skip
SHAPES = ("Shape", "Size")
# Their results from a number of rows are true for all numbers if they are true at the probes. Other
# operations may round it, as in n // 2 * 2, compare it, or choose, as in tf.maximum(n, 5).
_EXACT = frozenset(
    """Add AddV2 BroadcastArgs BroadcastGradientArgs BroadcastTo Cast ConcatOffset
    ConcatV2 DynamicStitch ExpandDims Fill GatherNd GatherV2 Identity InvertPermutation
    Mul Neg OnesLike Pack PreventGradient Prod Range Rank Reshape ReverseV2 Slice Split SplitV
    Squeeze StopGradient StridedSlice Sub Sum Tile Transpose Unpack ZerosLike""".split()
)
# Operations that take time. Behind an operation that combined all rows, towers share them again.
_WORK = re.compile("Conv|Dilation|MatMul|Einsum")


def _are_known(values: Iterable[Value]) -> bool:
    """Returns whether the trace knows the sizes of values."""
    return all(value.shape.is_fully_defined() for value in values)


def _is_known_entry(op: Op) -> bool:
    """Returns whether an operation takes an entry of a shape that the trace knows."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    sizes, begin = op.inputs[0].op.inputs[0].shape, tf.get_static_value(op.source.inputs[1])
    if sizes.rank is None or begin is None or op.source.get_attr("shrink_axis_mask") != 1:
        return False
    return sizes[int(begin[0])] is not None


class Analysis:
    """Gives every value of a trace its fact, and every operation its place.

    forced: names of traced operations that run once although a rule says otherwise.
    markers: the markers of statistics that each tower has for itself, by name.
    short: the open sizes at the last probe.
    """

    def __init__(
        self, forced: Collection[str] = (),
        markers: Mapping[str, own_moments.Marked] | None = None, short: int = SHORT[0],
    ) -> None:  # fmt: skip
        self._markers = markers or {}
        self.probes, self.forced = Probes(short), forced
        self._early: list[Op] = []
        self._sizes: dict[Op, bool] = {}  # what follows from shapes: may it change by the batch?
        self._seen: set[Value] = set()  # sizes whose formulas have been looked for
        self.is_inside = False

    def feed(self, inputs: Sequence[Value], batch: RowComponents) -> None:
        """Adds the inputs of the trace; batch: which of them tell the number of rows."""
        self.probes.feed_inputs(inputs, batch)
        for i in batch.dense:
            inputs[i].fact = rows(0)
        self._sizes.update((inputs[i].op, True) for i in batch.dense_shapes)

    def place(self, ops: Sequence[Op]) -> list[Op]:
        """Decides on operations; returns them in their order, with the reads before loops.

        The values that they read are known already. TensorFlow infers shapes for many operations at
        once: for all that follow from what is known, before the next lists and loops.
        """
        groups: dict[tuple[int, bool], list[Op]] = defaultdict(list)
        level_of: dict[Op, int] = {}
        for op in ops:
            # One inference of many operations takes as long as one of few, so they go in groups.
            alone = loops.has_own_shapes(op) or self._is_rounded(op)
            level = max((level_of.get(value.op, 0) for value in op.inputs), default=0)
            groups[level, alone].append(op)
            level_of[op] = level + alone
        reads: dict[Op, list[Op]] = {}
        for (_, alone), group in sorted(groups.items(), key=lambda item: item[0]):
            if not alone:
                self._place_group(group)
            for op in group if alone else []:
                if not loops.has_own_shapes(op):
                    self._place_rounded(op)
                    continue
                self._place_alone(op)
                if not self.is_inside:  # reads of inner loops come before the outermost one
                    reads[op], self._early = self._early, []
        return [each for op in ops for each in (*reads.get(op, []), op)]

    def place_inside(self, ops: Sequence[Op]) -> None:
        """Decides on the operations of a loop or a condition."""
        outside, self.is_inside = self.is_inside, True
        self.place(ops)
        self.is_inside = outside

    def read_before(self, op: Op) -> Value:
        """Returns the value of a variable that is read in a loop, read before the loop."""
        for read in self._early:
            if read.inputs == op.inputs:
                return read.outputs[0]
        self._early.append(new_op(op.type, op.source, op.inputs, op.source.outputs))
        (value,) = self._early[-1].outputs
        value.is_outside = True
        self.probes.feed_static(value)
        return value

    def _place_group(self, ops: Sequence[Op]) -> None:
        """Decides on operations whose shapes TensorFlow infers."""
        self.probes.extend(ops)
        for op in ops:
            self._decide(op, self._in_towers(op))

    def _is_rounded(self, op: Op) -> bool:
        """Returns whether an integer of sizes may be rounded, compared or chosen."""
        if op.type in SHAPES:
            self._sizes[op] = not op.inputs[0].shape.is_fully_defined()
        elif is_noise(op.type):
            return False  # it has a shape, but follows from more
        elif op.type == "Const" or op.inputs and all(v.op in self._sizes for v in op.inputs):
            changes = any(self._sizes[value.op] for value in op.inputs)
            self._sizes[op] = changes and not _is_known_entry(op)
        if not op.outputs or not self._sizes.get(op) or op.type in SHAPES:
            return False
        if op.outputs[0].dtype.is_floating or not _are_known(op.outputs):
            return False  # no size
        if not _are_known(op.inputs) or op.inputs[0].dtype.is_floating:
            return True  # such as the number of those elements of a range that are below 5
        return op.type not in _EXACT and op.type not in _MAKE_ROWS

    def _place_rounded(self, op: Op) -> None:
        """Decides on an integer that may be rounded. It is known if no input counts rows."""
        # tf.eye(n) takes the smaller one of n and n, and 4 * n // 4 is n for all n.
        values = [str(self.probes.values(value)) for value in op.inputs]
        is_same = op.type in ("Minimum", "Maximum") and values[0] == values[1] != "None"
        is_even = op.type == "FloorDiv" and self.probes.is_divisible(*op.inputs)
        if is_same or is_even or not any(map(self._may_count_rows, op.inputs)):
            self._place_group([op])
        else:
            self._decide(op, None)
            for value in op.outputs:
                self.probes.feed_static(value)

    def _place_alone(self, op: Op) -> None:
        """Decides on an operation with lists or functions, whose rule knows the shapes."""
        answer = loops.each_of(self, op)
        self._decide(op, answer)
        if answer is None:
            shapes: Sequence[Shapes | None] = composites.shapes_of_all(Look(op, self.probes))
        else:
            shapes = answer.shapes or [None] * len(op.outputs)
        for i, (value, probe_shapes) in enumerate(zip(op.outputs, shapes, strict=True)):
            value.elements = (
                answer.elements[i] if answer is not None and answer.elements else Elements()
            )
            if value in self.probes:
                continue  # the rule has given its shape
            if probe_shapes is None:
                self.probes.feed_static(value)
            else:
                self.probes.feed(value, probe_shapes)

    def _decide(self, op: Op, answer: Each | None) -> None:
        op.in_towers = answer
        for value in op.outputs:
            value.is_outside = not self.is_inside
        for value, _ in [(v, WHOLE) for v in op.inputs] if answer is None else answer.needs:
            self._find_formula(value)
        if answer is not None:
            for value, fact in zip(op.outputs, answer.facts, strict=True):
                value.fact = fact

    def _find_formula(self, value: Value) -> None:
        """Sets the formula of a size that is read, or of those that it is made of."""
        if value.fact != SIZE or value in self._seen:
            return
        self._seen.add(value)
        if not roots(value):
            value.formula = self.probes.formula(value)
        for given in value.op.inputs if value.formula is None else ():
            self._find_formula(given)

    def _in_towers(self, op: Op) -> Each | None:
        """Returns how an operation runs in every tower, or None."""
        # An operation that changes a state runs once: two towers would change it twice.
        if has_effects(op) or op.type == "ReadVariableOp":
            return None
        look = Look(op, self.probes, self.is_inside)
        if op.type in SHAPES:
            return self._shape(look)
        if self._is_size(look):
            return Each([], [SIZE] * len(op.outputs))
        answer = own_moments.each_of(op, self._markers) if self._markers else None
        if answer is None and EACH in look.facts():
            answer = own_moments.elementwise(op)
        answer = answer or as_rows.in_blocks(op, self.probes, self._by_rule) or self._by_rule(op)
        answer = answer or indices.joined_segments(look)
        # Cutting and joining rows takes time, which only such work is worth.
        if answer is None and _WORK.search(op.type) and not self.is_inside:
            return as_rows.cut_again(op, self.probes, self._by_rule)
        return answer

    def _by_rule(self, op: Op) -> Each | None:
        """Returns how the table's rule runs an operation in every tower, or None."""
        look = Look(op, self.probes, self.is_inside)
        is_divided = any(fact != ONCE for fact in look.facts())
        if op.type not in RULES or not (is_divided or op.type in _MAKE_ROWS):
            return None
        # Rules compare sizes at the probes. Without them, an answer would be a guess.
        read = [value for value in op.inputs if value.fact != SIZE]
        if any(self.probes.dims(value) is None for value in (*read, *op.outputs)):
            return None
        # A rule that is wrong about the rows of a result must not make wrong results.
        each = RULES[op.type](look)
        if each is None or not all(map(self._has_rows, op.outputs, each.facts)):
            return None
        return each

    def _has_rows(self, value: Value, fact: Fact) -> bool:
        """Returns whether the sizes of a value agree with its fact."""
        if not fact.has_rows:
            return True
        dims = self.probes.dims(value)
        return dims is not None and is_rows(dims[fact.axis])

    def _is_size(self, look: Look) -> bool:
        """Returns whether a result follows from shapes and constants, and does not count rows."""
        # Noise is no size: made where it is read, it would be other noise where XLA compiles.
        if is_noise(look.type) or not all(value.fact == SIZE for value in look.inputs):
            return False
        known = map(self._known_sizes, look.outputs)
        return all(sizes is not None and all(map(is_fixed, sizes)) for sizes in known)

    def _known_sizes(self, value: Value) -> list[Dim] | None:
        """Returns the sizes of a value at the probes, or of the integers that it is there."""
        sizes = self.probes.dims(value)
        found = self.probes.values(value) if sizes is None else None
        if found is not None:  # such as the axes that a gradient is summed over
            sizes = list(zip(*(v.shape for v in found)))
        return sizes

    def _may_count_rows(self, value: Value) -> bool:
        """Returns whether a size is not the same for all numbers of rows."""
        found = self.probes.values(value)
        return found is None or not is_fixed([(v.shape, v.tobytes()) for v in found])

    def _shape(self, look: Look) -> Each | None:
        """Answers for a shape: made where it is read, of constants, N and the tower's tensor."""
        for i, value in enumerate(look.inputs):
            dims, axis = look.dims(i), value.fact.axis
            if dims is not None and not value.shape.is_fully_defined():
                constant = [dim[0] if len(set(dim)) == 1 else None for dim in dims]
                value.shape = value.shape.merge_with(constant)  # the trace may know less
            # The axis of rows is N times a constant; each other axis must be known or read.
            if value.fact.has_rows:
                is_known = value.shape.rank is not None and dims is not None
                value.rows_each = rows_each(dims[axis]) if is_known else None
                others = [dim for a, dim in enumerate(dims or ()) if a != axis]
                is_known = value.rows_each is not None and all(map(is_fixed, others))
            else:
                is_known = value.shape.is_fully_defined()
            if not is_known:
                return self._shape_of_parts(look)
        return Each([], [SIZE] * len(look.outputs))

    def _shape_of_parts(self, look: Look) -> Each | None:
        """Answers for a shape with an entry that only all towers know, as after a merge of axes."""
        value = look.inputs[0]
        if look.type != "Shape" or value.fact.kind != "rows" or look.dims(0) is None:
            return None
        if any(not is_fixed(d) for a, d in enumerate(look.dims(0)) if a != value.fact.axis):
            return None
        return Each([(value, OWN)], [PART], emit=loops.shape_as_part(value.fact.axis))
