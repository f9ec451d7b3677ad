"""Finds the batch axis of a tensor after an operation, from shapes and constants."""

import math
from typing import Any

import tensorflow as tf

from towers.graph.facts import UNKNOWN, Op


def open_axis(tensor: tf.Tensor, like: int | None = None) -> int | None:
    """Returns an axis of open size: `like` if it is one, else the first; None without any."""
    if tensor.shape.rank is None:
        return UNKNOWN
    places = _open(tensor)
    if not places:
        return None
    return like if like in places else places[0]


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


def regrouped(each: int, source: tf.Tensor, result: tf.Tensor) -> int | None:
    """Returns the number of rows per example after a Reshape into [rows, ...].

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


# Slices.


def python_index(op: Op) -> int | slice | None:
    """Returns the Python index of a Slice or StridedSlice of a vector; None if it varies."""
    values: list[Any] = [tf.get_static_value(v) for v in op.inputs[1:]]
    if any(value is None or value.shape != (1,) for value in values):
        return None
    begin, end, *step = (int(value[0]) for value in values)
    if op.type == "Slice":
        return slice(begin, None if end < 0 else begin + end)
    if _mask(op, "shrink_axis", 0):
        return begin
    return slice(
        None if _mask(op, "begin", 0) else begin, None if _mask(op, "end", 0) else end, *step
    )


def rows_taken(op: Op, axis: int) -> tuple[bool, bool]:
    """Returns whether a Slice or StridedSlice takes all rows of the axis, and whether it takes
    consecutive rows that begin and end at multiples of n, the number of examples.

    The latter is for a batch that holds two views, one after the other: rows[:n], rows[n:].
    """
    place = axis if op.type == "Slice" else _place_in_slice(op, axis)
    if place is None:
        return True, False
    begins, ends = (
        place < len(fact.parts) and fact.parts[place].degree == 1 for fact in op.facts[1:3]
    )
    at_start = _element(op.inputs[1], place) == 0
    if op.type == "Slice":
        return at_start and (ends or _element(op.inputs[2], place) == -1), False
    if _mask(op, "shrink_axis", place) or _element(op.inputs[3], place) != 1:
        return False, False
    at_start, ends = at_start or _mask(op, "begin", place), ends or _mask(op, "end", place)
    return at_start and ends, (at_start or begins) and ends


def takes_the_last(op: Op) -> bool:
    """Returns whether a StridedSlice counts from the end of an axis, as x[:, -1] does."""
    begin = tf.get_static_value(op.inputs[1]) if op.type == "StridedSlice" else None
    return begin is not None and bool((begin < 0).any())


def _place_in_slice(op: Op, axis: int) -> int | None:
    """Returns the index of the StridedSlice's part for this input axis; None without one."""
    count, rank = op.inputs[1].shape[0], op.inputs[0].shape.rank
    if count is None or rank is None:
        return 0
    num_new = sum(_mask(op, "new_axis", i) for i in range(count))
    reached = 0
    for place in range(count):
        if _mask(op, "ellipsis", place):
            reached += rank - (count - num_new - 1)
        elif not _mask(op, "new_axis", place):
            if reached == axis:
                return place
            reached += 1
    return None


def _mask(op: Op, name: str, place: int) -> bool:
    return bool(op.operation.get_attr(f"{name}_mask") >> place & 1)


def _element(tensor: tf.Tensor, index: int) -> int | None:
    values = tf.get_static_value(tensor, partial=True)
    value = None if values is None else values.reshape(-1)[index]
    return None if value is None else int(value)


# Products of matrices.


def contracted(op: Op) -> tuple[bool, int | None]:
    """Returns whether a product of matrices sums over rows, and the batch axis of its result.

    The axis is None if rows are summed, or if the result has two, which pair rows with each other.

    Args:
        op: the MatMul, BatchMatMul or Einsum.
    """
    axes = [fact.axis for fact in op.facts]
    if UNKNOWN in axes or any(v.shape.rank is None for v in op.inputs):
        return False, open_axis(op.output)
    terms, result = _terms(op)
    labels = {term[axis] for term, axis in zip(terms, axes) if axis is not None}
    if len(labels) > 1:
        return False, None
    label = labels.pop()
    return label not in result, result.index(label) if label in result else None


def _terms(op: Op) -> tuple[list[str], str]:
    """Returns the labels of the axes of a product's inputs and of its result, as in Einsum."""
    ranks: list[int] = [v.shape.rank for v in op.inputs]
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
    parts = terms.split(",")
    spread = [rank - len(part) + 3 if "..." in part else 0 for part, rank in zip(parts, ranks)]
    dots = "".join(chr(0x100 + i) for i in range(max(spread)))
    return [
        part.replace("...", dots[len(dots) - count:]) for part, count in zip(parts, spread)
    ], result.replace("...", dots)
