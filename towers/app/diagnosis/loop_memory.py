"""Estimates the memory of TensorLists, in which loops keep each time step for their gradients."""

import math

import tensorflow as tf

from towers.divide.facts import PART, Op, Value
from towers.divide.flat import LOOPS
from towers.divide.probes import ROWS
from towers.machine.tensorflow_internals import called_graphs


def list_bytes(value: Value, rows: int) -> int:
    """Returns the bytes that a TensorList adds in a tower with so many rows.

    These are the elements that a loop puts into a new list, or the zeros of a list of zeros. Other
    lists, such as those that a loop reads, have their bytes already.
    """
    new, shapes = value.op, value.elements.shapes
    is_filled = value.op.type in LOOPS
    if is_filled:
        new = value.op.inputs[value.index].op
    if new.type not in ("EmptyTensorList", "TensorListReserve", "ZerosLike") or not shapes:
        return 0
    if not value.fact.has_rows and value.fact != PART:
        return 0  # of a size, or of a value from outside of the loop, towers keep nothing
    if is_filled and _is_shared(value, rows):
        return 0
    dims = zip(*(tf.TensorShape(shape).as_list() for shape in shapes[:2]), strict=True)
    # Sizes that differ between the probes grow with the rows.
    element = [first if first == second else first // ROWS[0] * rows for first, second in dims]
    size = _maker(value).source.get_attr("element_dtype").size * math.prod(n or 1 for n in element)
    return int(_num_elements(value, rows) * size)


def _is_shared(value: Value, rows: int) -> bool:
    """Returns whether a loop's list has the elements of another list that is kept as long."""
    (body, *_) = called_graphs(value.op.source, "body")
    element, _ = _put_in(body, value.index)
    if element is None:
        return True  # another list that the loop reads, or gradients of its elements
    same = [other for other in value.op.outputs if _put_in(body, other.index)[0] is element]
    # Lists for the gradient, to which the loop appends, are kept longest.
    return max(same, key=lambda v: (_num_elements(v, rows), _put_in(body, v.index)[1])) is not value


def _put_in(body: tf.Graph, index: int) -> tuple[tf.Tensor | None, bool]:
    """Returns what a step of a loop puts into a list, and whether it appends it.

    None stands for a loop variable that is no such list.
    """
    last = _source(body.outputs[index])
    if last.op.type not in ("TensorListPushBack", "TensorListSetItem"):
        return None, False
    element = _source(last.op.inputs[1 if last.op.type == "TensorListPushBack" else 2])
    # The state before a step is the state after the step before it.
    for given, after in zip(body.inputs, body.outputs, strict=True):
        if element is given:
            element = _source(after)
            break
    return element, last.op.type == "TensorListPushBack"


def _source(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def _num_elements(value: Value, rows: int) -> int:
    """Returns how many elements a list has: as many as a loop has steps, if it is new."""
    if value.elements.number:
        return value.elements.number[0]
    most = _maker(value).inputs[-1].formula
    if most is not None:
        return int(most[0] + most[1] * rows)
    known = [given.elements.number for given in value.op.inputs]  # of the lists that it reads
    return max((number[0] for number in known if number), default=1)


def _maker(value: Value) -> Op:
    """Returns the operation that made a list before loops filled it."""
    while value.op.type in (*LOOPS, "ZerosLike"):
        value = value.op.inputs[value.index]
    return value.op
