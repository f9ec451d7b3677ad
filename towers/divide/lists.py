"""Rules of TensorLists, in which loops keep what they read and write.

A list that runs in the towers has the fact of its elements. In each tower it holds the tower's own.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from towers.divide.context import Context, reads
from towers.divide.facts import (
    AS_PART, EMPTY, ONCE, OWN, PART, SAME, SIZE, SIZES, WHOLE, Each, Elements, Fact, Need, Op,
    Shapes, Tensors, Value, rows, rows_of,
)  # fmt: skip
from towers.divide.probes import ROWS, Probes, is_fixed, is_rows
from towers.divide.rule import Look, Rule, rule

LISTS: dict[str, Rule] = {}


def need_for(fact: Fact, value: Value | None = None) -> Need:
    """Returns how a tower reads a value that is to have this fact. value: it, if it is a list."""
    if value is not None and value.dtype == tf.variant:
        if value.op.in_towers is None:
            return WHOLE
        return OWN
    return {"rows": rows_of(fact.axis), "part": AS_PART, "empty": OWN, "blocks": OWN}.get(
        fact.kind, WHOLE
    )


def joined(first: Fact, second: Fact, probes: Probes, *values: Value) -> Fact | None:
    """Returns the fact of a value that has either fact, or None if there is none.

    values: the values behind the facts that are no lists. A whole value may be cut into rows if it
    has as many, and taken for parts, of which all but one are zeros.
    """
    if first == second or second == EMPTY:
        return first
    if first == EMPTY:
        return second
    kinds = {first.kind, second.kind}
    if kinds == {"once", "size"}:
        return ONCE
    # One value is divided among towers. The other one, which is whole, may be divided, too.
    split = first if first.kind in ("rows", "part") else second
    if kinds == {"sizes", "once"}:
        return ONCE
    if not kinds & {"once", "size"} or split.kind not in ("rows", "part"):
        return None
    if split == PART:
        if all(v.dtype.is_floating or v.dtype == tf.variant for v in values):
            return PART
        return None
    # A whole value is cut into rows only if it has as many rows as the batch, for all batches.
    for value in values:
        dims = probes.dims(value)
        if dims is None or len(dims) <= split.axis or not is_rows(dims[split.axis]):
            return None
    return split


_list_rule = functools.partial(rule, table=LISTS)


def _element_shape(
    value: Value, fact: Fact, probes: Probes, first: int = 0
) -> Callable[[Context], tf.Tensor]:
    """Returns a function that makes the shape of a tower's element; -1 is unknown.

    value: an element, or elements along axis 0 if `first` is 1.
    """
    dims = probes.dims(value)
    sizes = [-1 if n is None else n for n in value.shape[first:]] if value.shape.rank else None

    def shape(context: Context) -> tf.Tensor:
        if sizes is None:
            return tf.constant(-1)
        own: list[int | tf.Tensor] = list(sizes)
        if fact.has_rows and dims is not None:
            axis = fact.axis
            own[axis] = dims[axis + first][0] // ROWS[0] * context.place.count
        return tf.stack(own)

    return shape


@_list_rule("EmptyTensorList", "TensorListReserve")
def new_list(look: Look) -> Each | None:
    """Makes a list without elements; towers leave the shape of its elements open."""
    has_count = look.type == "TensorListReserve"
    counts = _counts(look) if has_count else None
    if has_count and (counts is None or not is_fixed(counts)):
        return None  # a list with an element for each row
    dtype = look.op.source.get_attr("element_dtype")

    def make(context: Context, op: Op, values: Tensors) -> Tensors:
        if has_count:
            return [tf.raw_ops.TensorListReserve(
                element_shape=-1, num_elements=values[0], element_dtype=dtype
            )]  # fmt: skip
        return [tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=values[0], element_dtype=dtype
        )]  # fmt: skip

    return Each([(look.inputs[1], WHOLE)], [EMPTY], make, elements=[Elements(number=counts)])


def _counts(look: Look) -> tuple[int, ...] | None:
    """Returns how many elements a new list has, at the probes."""
    found = look.values(1)
    if found is None:
        return None
    return tuple(int(n) for n in found)


@_list_rule("TensorListFromTensor")
def from_tensor(look: Look) -> Each | None:
    """Makes a list of the slices along axis 0, which must not be the axis of rows."""
    dims, fact = look.dims(0), look.fact(0)
    # A list of rows would have another number of elements in each tower.
    if dims is None or is_rows(dims[0]):
        return None
    # Towers cut a whole value, such as the masks of a loop, if its slices have rows.
    if fact == ONCE:
        axis = next((a for a, dim in enumerate(dims) if is_rows(dim)), None)
        if axis is None:
            return None
        fact = rows(axis)
    if fact.kind != "rows" and fact != PART:
        return None
    elements = Elements([dim[1:] for dim in zip(*dims)], dims[0])
    inner = rows(fact.axis - 1) if fact.kind == "rows" else PART

    def make(context: Context, op: Op, values: Tensors) -> Tensors:
        return [tf.raw_ops.TensorListFromTensor(tensor=values[0], element_shape=tf.constant(-1))]

    return Each([(look.inputs[0], need_for(fact))], [inner], make, elements=[elements])


def _put(look: Look, item: int) -> Each | None:
    """Answers for adding an element to a list."""
    whole, value = look.inputs[0], look.inputs[item]
    if value.fact == SAME:
        return None  # a list of such lists
    if look.type == "TensorListPushBack" and look.is_inside and _is_same_again(whole, value):
        return Each([(whole, OWN)], [SAME], _pass_on, elements=[Elements(source=value)])
    before, added, source = whole.fact, look.fact(item), None
    is_size = value.fact == SIZE and look.values(item) is not None
    if look.type == "TensorListPushBack" and is_size and before in (EMPTY, SIZES):
        if _same(look, whole.elements.source, value):
            added, source = SIZES, value
    if before == SIZES and added != SIZES:
        before = ONCE
    # A list that runs once would need whole elements, and towers cannot meet within a loop.
    if before == ONCE and added != ONCE or before == ONCE and whole.op.in_towers is None:
        return None
    fact = joined(before, added, look.probes, *([value] if added == ONCE else []))
    if fact is None or fact == EMPTY or fact.kind == "blocks" and look.type == "TensorListSetItem":
        return None  # no rule joins the elements of a list of blocks
    shapes = [None if s.rank is None else s for s in look.probes.shapes(value)]
    known = whole.elements.shapes
    if known is not None and list(map(tf.TensorShape, known)) != list(map(tf.TensorShape, shapes)):
        shapes = [None] * len(shapes)  # such as patches of several sizes
    needs = [(whole, OWN), *((v, WHOLE) for v in look.inputs[1:item]), (value, need_for(fact))]
    return Each(needs, [fact], elements=[Elements(shapes, whole.elements.number, source)])


def _is_same_again(whole: Value, value: Value) -> bool:
    """Returns whether a loop adds a whole value from outside to a list of this value alone.

    The gradient of a loop reads weights from such a list. The list may stay empty.
    """
    if value.fact != ONCE or not value.is_outside or value.dtype == tf.variant:
        return False
    return whole.fact == EMPTY or whole.fact == SAME and whole.elements.source is value


def _pass_on(context: Context, op: Op, values: Tensors) -> Tensors:
    return values


def _same(look: Look, first: Value | None, second: Value) -> bool:
    """Returns whether two sizes are equal at all probes."""
    if first is None:
        return True
    values = look.probes.values(first), look.probes.values(second)
    return None not in values and str(values[0]) == str(values[1])


@_list_rule("TensorListSetItem")
def set_item(look: Look) -> Each | None:
    """Replaces an element."""
    return _put(look, 2)


@_list_rule("TensorListPushBack")
def push_back(look: Look) -> Each | None:
    """Adds an element."""
    return _put(look, 1)


def _element(look: Look, output: int) -> tuple[Callable[[Context], tf.Tensor], Shapes] | None:
    """Returns the emission of an element shape, and the element's shapes at the probes."""
    known = look.inputs[0].elements.shapes
    if known is None or None in known:
        return None
    look.probes.feed(look.outputs[output], known)
    return _element_shape(look.outputs[output], look.inputs[0].fact, look.probes), known


@_list_rule("TensorListGetItem")
def get_item(look: Look) -> Each | None:
    """Reads an element."""
    fact, found = look.inputs[0].fact, _element(look, 0)
    if fact != PART and fact.kind != "rows" or found is None:
        return _once_in_towers(look, 2)
    shape, probe_shapes = found

    def get(context: Context, op: Op, values: Tensors) -> Tensors:
        return context.copy(op, [*values, shape(context)])

    needs = [(look.inputs[0], OWN), (look.inputs[1], WHOLE)]
    return Each(needs, [fact], get, [probe_shapes])


@_list_rule("TensorListPopBack")
def pop_back(look: Look) -> Each | None:
    """Removes the last element. If all elements equal one size, the element is known."""
    fact, elements = look.inputs[0].fact, look.inputs[0].elements
    if fact == SIZES and elements.source is not None:
        look.probes.alias(look.outputs[1], elements.source)
        look.outputs[1].formula = elements.source.formula
        needs = [(look.inputs[0], OWN), (look.inputs[1], WHOLE)]
        return Each(needs, [SIZES, SIZE], elements=[elements, Elements()])
    if fact == SAME and elements.source is not None:
        look.probes.alias(look.outputs[1], elements.source)
        needs = [(look.inputs[0], OWN), (elements.source, WHOLE)]
        return Each(needs, [SAME, ONCE], _pass_on, elements=[elements, Elements()])
    found = _element(look, 1)
    if fact != PART and not fact.has_rows or found is None:
        return _once_in_towers(look, 1)
    shape, probe_shapes = found

    def pop(context: Context, op: Op, values: Tensors) -> Tensors:
        return context.copy(op, [values[0], shape(context)])

    needs = [(look.inputs[0], OWN)]
    return Each(needs, [fact, fact], pop, [None, probe_shapes], [elements, Elements()])


def _once_in_towers(look: Look, shape_input: int) -> Each | None:
    """Answers for reading a list that each tower has, with equal elements."""
    value = look.inputs[0]
    if value.op.in_towers is None or value.fact != ONCE or not look.is_size(shape_input):
        return None
    needs = [(value, OWN), *((v, WHOLE) for v in look.inputs[1:])]
    shapes, elements = [value.elements.shapes], [Elements()]
    if len(look.outputs) == 2:  # the rest of the list comes before the element
        shapes, elements = [None, *shapes], [value.elements, *elements]
    return Each(needs, [ONCE] * len(look.outputs), None, shapes, elements)


@_list_rule("TensorListStack")
def stack(look: Look) -> Each | None:
    """Joins the elements along a new axis 0."""
    value = look.inputs[0]
    fact, known = value.fact, value.elements.shapes
    count = value.elements.number or (look.outputs[0].shape[:1].as_list() or [None]) * len(ROWS)
    if fact != PART and fact.kind != "rows" or known is None or None in known or None in count:
        return None
    # TensorFlow knows no shape of an element, so the probes get what was put into the list.
    shapes = [[n, *shape] for n, shape in zip(count, known, strict=True)]
    look.probes.feed(look.outputs[0], shapes)
    shape = _element_shape(look.outputs[0], fact, look.probes, 1)

    def make(context: Context, op: Op, values: Tensors) -> Tensors:
        return context.copy(op, [values[0], shape(context)])

    result = rows(fact.axis + 1) if fact.kind == "rows" else PART
    return Each([(value, OWN)], [result], make, [shapes])


@_list_rule("TensorListLength")
def length(look: Look) -> Each | None:
    """Counts the elements, as many in each tower."""
    value = look.inputs[0]
    if value.fact == ONCE or value.elements.number is None:
        return None
    look.probes.feed_numbers(look.outputs[0], value.elements.number)
    if len(set(value.elements.number)) == 1:
        look.outputs[0].formula = np.array(value.elements.number[0]), np.array(0)
        return Each([], [SIZE])
    return Each([(value, OWN)], [SIZE])


@_list_rule("TensorListElementShape")
def element_shape(look: Look) -> Each | None:
    """Reads the shape of an element. Towers make lists whose shapes are open."""
    value = look.inputs[0]
    if value.fact == ONCE:
        return None
    shape = look.outputs[0].shape

    def unknown(context: Context, op: Op, values: Tensors) -> Tensors:
        return [tf.constant(-1, op.outputs[0].dtype, shape if shape.is_fully_defined() else [])]

    return Each([], [ONCE], unknown)


@_list_rule("ZerosLike", "Identity", "AddN", "StopGradient")
def same_list(look: Look) -> Each | None:
    """Passes a list on, adds lists, or fills one with zeros."""
    first = look.inputs[0]
    if any(value.fact != first.fact for value in look.inputs) or first.fact == ONCE:
        return None
    needs = [(value, OWN) for value in look.inputs]
    return Each(needs, [first.fact], elements=[first.elements])


def whole_lists(ops: Sequence[Op], outputs: Sequence[Value]) -> set[str]:
    """Returns the traced operations of lists that towers hold and that are needed whole."""
    # A list is passed from operation to operation. If one needs it whole, all of them run once.
    lists = [value for op in ops for value, need in reads(op) if need == WHOLE and _is_list(value)]
    lists += [value for value in outputs if _is_list(value)]
    # Only lists that towers hold count: others are whole already.
    waiting = [value for value in lists if value.op.in_towers is not None]
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            for op in ops:
                if value in op.outputs or value in op.inputs:
                    waiting += [v for v in (*op.inputs, *op.outputs) if _is_list(v)]
    touched = (op for op in ops if any(v in seen for v in (*op.inputs, *op.outputs)))
    return {op.source.name for op in touched}


def _is_list(value: Value) -> bool:
    return value.dtype == tf.variant
