"""Finds the batch axis of a tensor after an operation, from shapes and constants."""

import math
from typing import Any

import tensorflow as tf

from towers.graph.facts import UNKNOWN, Fact, Op


def open_axis(tensor: tf.Tensor, like: int | None = None) -> int | None:
    """Returns an axis of open size: `like` if it is one, else the first; None without any."""
    if tensor.shape.rank is None:
        return UNKNOWN
    places = _open(tensor)
    return like if like in places else next(iter(places), None)


def axis_like(source: tf.Tensor, result: tf.Tensor, axis: int | None) -> int | None:
    """Returns the batch axis after a change of shape: it keeps its place among the open axes."""
    if axis is None or axis == UNKNOWN or result.shape.rank is None:
        return open_axis(result)
    before, after = _open(source), _open(result)
    if not after:
        return None
    index = before.index(axis) if axis in before and len(before) == len(after) else 0
    return after[index]


def has_open_rows(tensor: tf.Tensor) -> bool:
    """Returns whether rows may be of any length: another axis than the batch's is open."""
    return tensor.dtype == tf.variant or tensor.shape.rank is None or len(_open(tensor)) > 1


def _open(tensor: tf.Tensor) -> list[int]:
    return [i for i, size in enumerate(tensor.shape.as_list()) if size is None]


def rows_per_example(each: int, source: tf.Tensor, result: tf.Tensor) -> int | None:
    """Returns the number of rows per example, `each` before, after a Reshape into [rows, ...].

    0 means a fixed, unknown number. None means that a row may hold values of several examples.
    """
    if source.shape.rank is None or result.shape.rank is None:
        return 0
    before, after = (
        math.prod(size for size in v.shape.as_list() if size is not None) for v in (source, result)
    )
    are_known = len(_open(source)) == 1 and len(_open(result)) == 1
    if are_known and each and before and after:
        count, rest = divmod(each * before, after)
        return None if rest else count
    if not after or before % after == 0 or len(_open(result)) > 1:
        return each if source.shape.rank == result.shape.rank else 0
    return None


def named_axes(op: Op, index: int = 1) -> list[int] | None:
    """Returns the axes that input `index` lists, counted from 0; None if it is not constant."""
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[index])
    if axes is None or rank == 0:
        return None if axes is None else []
    return [int(axis) if rank is None else int(axis) % rank for axis in axes.reshape(-1)]


def slice_along(op: Op, axis: int) -> tuple[Any, Any, Any, bool]:
    """Returns begin, end and step of a Slice or StridedSlice along an axis of its input.

    A bound is None if it is left out, an int, or a Fact if it is not constant. The last result
    says whether begin is an index, which removes the axis.
    """

    def bound(index: int, place: int) -> Any:
        values, parts = tf.get_static_value(op.inputs[index], True), op.facts[index].parts
        value = None if values is None else values.reshape(-1)[place]
        if value is not None:
            return int(value)
        return parts[place] if place < len(parts) else Fact(degree=None)

    if op.type == "Slice":
        begin, end = bound(1, axis), bound(2, axis)
        if begin != 0 and end != -1:
            are_known = isinstance(begin, int) and isinstance(end, int)
            end = begin + end if are_known else Fact(degree=None)
        return begin, None if end == -1 else end, 1, False

    def masks(name: str, place: int) -> bool:
        return bool(op.operation.get_attr(f"{name}_mask") >> place & 1)

    count, rank = op.inputs[1].shape[0] or 1, op.inputs[0].shape.rank or 0
    num_new = sum(masks("new_axis", i) for i in range(count))
    places: list[int | None] = []  # of the input's axes among the slices
    for i in range(count):
        if masks("ellipsis", i):
            places += [None] * (rank - (count - num_new - 1))
        elif not masks("new_axis", i):
            places.append(i)
    place = places[axis] if axis < len(places) else None
    if place is None:
        return None, None, 1, False
    begin, end = (
        None if masks(name, place) else bound(i, place) for i, name in [(1, "begin"), (2, "end")]
    )
    return begin, end, bound(3, place), masks("shrink_axis", place)


def rows_taken(op: Op, axis: int) -> tuple[bool, bool]:
    """Returns whether a Slice or StridedSlice takes all rows of the axis, and whether it takes
    consecutive rows that begin and end at multiples of n, the number of examples.

    The latter is for a batch that holds two views, one after the other: rows[:n], rows[n:].
    """
    begin, end, step, is_index = slice_along(op, axis)
    if is_index or step != 1:
        return False, False
    is_start = begin in (None, 0)
    by_count = is_start or isinstance(begin, Fact) and begin.degree == 1
    ends = end is None or isinstance(end, Fact) and end.degree == 1
    return is_start and ends, by_count and ends


def contract(op: Op) -> tuple[bool, int | None]:
    """Returns whether a MatMul, BatchMatMul or Einsum sums over rows, and its result's batch axis.

    The axis is None if rows are summed, or if the result has two, which pair rows with each other.
    """
    axes = [fact.axis for fact in op.facts]
    if UNKNOWN in axes or any(v.shape.rank is None for v in op.inputs):
        return False, open_axis(op.output)
    if op.type == "Einsum":
        equation = op.operation.get_attr("equation").decode().replace(" ", "")
    else:
        flips = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        left, right = (
            matrix[::-1] if op.operation.get_attr(flip) else matrix
            for matrix, flip in zip(("ik", "kj"), flips)
        )
        equation = f"...{left},...{right}->...ij"
    terms, result = equation.split("->")

    def spell_out(term: str, tensor: tf.Tensor) -> str:
        """Replaces an ellipsis by labels, which align at the last axis."""
        count = tensor.shape.rank - len(term.replace("...", ""))
        return term.replace("...", "".join(chr(0x100 + i) for i in range(count, 0, -1)))

    spelled = map(spell_out, terms.split(","), op.inputs)
    labels = {term[axis] for term, axis in zip(spelled, axes) if axis is not None}
    if len(labels) > 1:
        return False, None
    label, result = labels.pop(), spell_out(result, op.output)
    return label not in result, result.index(label) if label in result else None
