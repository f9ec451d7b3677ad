"""The batch axis of a tensor after an operation, by shapes and constants."""

import math
from collections.abc import Sequence

import tensorflow as tf

from towers.graph.facts import UNKNOWN, Fact


def open_axis(tensor: tf.Tensor, like: int | None = None) -> int | None:
    """The axis that the trace left open; `like` where several are. None: all are known."""
    if tensor.shape.rank is None:
        return UNKNOWN
    places = _open(tensor)
    if not places:
        return None
    return like if like in places else places[0]


def axis_like(source: tf.Tensor, result: tf.Tensor, axis: int | None) -> int | None:
    """The batch axis of the same elements in another shape: as many open axes before it."""
    if axis is None or axis == UNKNOWN or result.shape.rank is None:
        return open_axis(result)
    before, after = _open(source), _open(result)
    if not after:
        return None
    index = before.index(axis) if axis in before and len(before) == len(after) else 0
    return after[index]


def has_open_rows(tensor: tf.Tensor) -> bool:
    """Whether rows may be of any length: an axis is open beside the batch's."""
    return tensor.dtype == tf.variant or tensor.shape.rank is None or len(_open(tensor)) > 1


def _open(tensor: tf.Tensor) -> list[int]:
    return [i for i, size in enumerate(tensor.shape.as_list()) if size is None]


def transposed(operation: tf.Operation, axis: int | None) -> int | None:
    """The axis after a Transpose."""
    order = tf.get_static_value(operation.inputs[1])
    if axis is None or axis == UNKNOWN or order is None:
        return open_axis(operation.outputs[0])
    return [int(i) for i in order].index(axis)


def regrouped(each: int, source: tf.Tensor, result: tf.Tensor) -> int | None:
    """The number of rows for each example after a Reshape into [rows, ...].

    0: some fixed number; None: rows of several examples may be put into one.
    """
    if source.shape.rank is None or result.shape.rank is None:
        return 0
    before, after = _known_product(source.shape), _known_product(result.shape)
    are_known = len(_open(source)) == 1 and len(_open(result)) == 1
    if are_known and each and before and after:
        count, rest = divmod(each * before, after)
        return None if rest else count
    if not after or before % after == 0 or len(_open(result)) > 1:
        return each if source.shape.rank == result.shape.rank else 0
    return None


def _known_product(shape: tf.TensorShape) -> int:
    return math.prod(size for size in shape.as_list() if size is not None)


def reduced_axes(operation: tf.Operation, index: int = 1) -> list[int] | None:
    """The axes that input `index` names, counted from 0; None where it names all, or unknown ones.
    """
    rank = operation.inputs[0].shape.rank
    axes = tf.get_static_value(operation.inputs[index])
    if axes is None or rank is None:
        return None if rank is not None or axes is None else [int(a) for a in axes.reshape(-1)]
    return [int(axis) % rank for axis in axes.reshape(-1)] if rank else []


def taken(operation: tf.Operation) -> tuple[bool, int, int | None, int] | None:
    """(shrinks, begin, end, step) of a slice of a vector; None where no constant says it."""
    values = [tf.get_static_value(v) for v in operation.inputs[1:]]
    if any(value is None or value.shape != (1,) for value in values):
        return None
    begin = int(values[0][0])
    if operation.type == "Slice":
        size = int(values[1][0])
        return False, begin, None if size < 0 else begin + size, 1
    masks = {name: operation.get_attr(f"{name}_mask") for name in ("begin", "end", "shrink_axis")}
    end, step = int(values[1][0]), int(values[2][0])
    return (
        bool(masks["shrink_axis"]), 0 if masks["begin"] and not masks["shrink_axis"] else begin,
        None if masks["end"] else end, step,
    )


def takes_all(operation: tf.Operation, axis: int, facts: Sequence[Fact]) -> bool:
    """Whether a Slice or StridedSlice takes all rows of the axis."""
    if operation.type == "Slice":
        size = _element(operation.inputs[2], axis)
        is_whole = size == -1 or _is_count(facts[2], axis)
        return _element(operation.inputs[1], axis) == 0 and is_whole
    spec = _spec_of(operation, axis)
    if spec is None:
        return True
    if operation.get_attr("shrink_axis_mask") >> spec & 1:
        return False
    from_start = operation.get_attr("begin_mask") >> spec & 1 or _element(
        operation.inputs[1], spec) == 0
    to_end = operation.get_attr("end_mask") >> spec & 1 or _is_count(facts[2], spec)
    return bool(from_start and to_end and _element(operation.inputs[3], spec) == 1)


def takes_the_last(operation: tf.Operation) -> bool:
    """Whether a StridedSlice takes elements by their place from the end: x[:, -1]."""
    if operation.type != "StridedSlice":
        return False
    begin = tf.get_static_value(operation.inputs[1])
    return begin is not None and bool((begin < 0).any())


def begins_and_ends_at_counts(operation: tf.Operation, axis: int, facts: Sequence[Fact]) -> bool:
    """Whether a StridedSlice of consecutive rows begins and ends at multiples of their number.

    As of two views of a batch, one after the other: rows[:n], rows[n:].
    """
    spec = None if operation.type == "Slice" else _spec_of(operation, axis)
    if spec is None or _element(operation.inputs[3], spec) != 1:
        return False
    if operation.get_attr("shrink_axis_mask") >> spec & 1:
        return False
    from_start = operation.get_attr("begin_mask") >> spec & 1 or _element(
        operation.inputs[1], spec) == 0
    to_end = operation.get_attr("end_mask") >> spec & 1
    return bool((from_start or _is_count(facts[1], spec)) and (to_end or _is_count(facts[2], spec)))


def _spec_of(operation: tf.Operation, axis: int) -> int | None:
    """Which part of a StridedSlice is of an axis of its input; None: none is."""
    count, rank = operation.inputs[1].shape[0], operation.inputs[0].shape.rank
    if count is None or rank is None:
        return 0
    masks = [operation.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis")]
    news = sum(masks[1] >> i & 1 for i in range(count))
    place = 0
    for spec in range(count):
        if masks[0] >> spec & 1:
            place += rank - (count - news - 1)
        elif not masks[1] >> spec & 1:
            if place == axis:
                return spec
            place += 1
    return None


def _element(tensor: tf.Tensor, index: int) -> int | None:
    value = tf.get_static_value(tensor)
    if value is not None:
        return int(value.reshape(-1)[index])
    if tensor.op.type == "Pack":
        part = tf.get_static_value(tensor.op.inputs[index])
        return None if part is None else int(part)
    return None


def _is_count(fact: Fact, index: int) -> bool:
    return index < len(fact.parts) and fact.parts[index].degree == 1


def contracted(operation: tf.Operation, axes: Sequence[int | None]) -> tuple[bool, int | None]:
    """(whether a product of matrices adds up rows, else the batch axis of its result).

    The axis is None where the result has two: rows are compared with each other.

    Args:
        operation: a MatMul, BatchMatMul or Einsum.
        axes: the batch axes of its inputs.
    """
    if UNKNOWN in axes or any(v.shape.rank is None for v in operation.inputs):
        return False, open_axis(operation.outputs[0])
    terms, result = _terms(operation)
    labels = {term[axis] for term, axis in zip(terms, axes) if axis is not None}
    if len(labels) > 1:
        return False, None
    label = labels.pop()
    return label not in result, result.index(label) if label in result else None


def _terms(operation: tf.Operation) -> tuple[list[str], str]:
    """The labels of the axes of a product's inputs and of its result, as Einsum has them."""
    ranks = [v.shape.rank for v in operation.inputs]
    if operation.type == "Einsum":
        terms, result = operation.get_attr("equation").decode().replace(" ", "").split("->")
        parts = terms.split(",")
        spread = max(
            [rank - len(part) + 3 for rank, part in zip(ranks, parts) if "..." in part], default=0
        )
        dots = "".join(chr(0x100 + i) for i in range(spread))
        return [
            part.replace("...", dots[len(dots) - max(rank - len(part) + 3, 0):])
            for part, rank in zip(parts, ranks)
        ], result.replace("...", dots)
    is_plain = operation.type == "MatMul"
    flips = [operation.get_attr(name) for name in (
        ("transpose_a", "transpose_b") if is_plain else ("adj_x", "adj_y"))]
    outer = "".join(chr(0x100 + i) for i in range(max(ranks) - 2))
    matrices = [m[::-1] if flip else m for m, flip in zip(("ik", "kj"), flips)]
    return [
        outer[len(outer) - (rank - 2):] + matrix for rank, matrix in zip(ranks, matrices)
    ], outer + "ij"
