"""Rules of operations that move elements: they change shapes, choose, join and repeat."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from towers.divide.facts import ONCE, OWN, PART, WHOLE, Each, rows, rows_of, shape_of
from towers.divide.probes import ROWS, is_fixed, is_rows
from towers.divide.rule import Look, kept_axes, rule


def _product(dims: Sequence[Any]) -> tuple[int, ...]:
    """Returns the product of sizes at each probe."""
    ones = (1,) * len(ROWS)
    return tuple(int(np.prod(column, dtype=object)) for column in zip(ones, *dims))


@rule("Reshape")
def reshape(look: Look) -> Each | None:
    """Keeps rows together, if as many elements come before the axis of the rows as after it."""
    if look.fact(0) == PART:
        return look.linear()
    dims, out = look.dims(0), look.out()
    if look.fact(0).kind != "rows" or dims is None or out is None or not look.is_size(1):
        return None
    axis = look.only_rows_axis()
    of_rows = look.fact(0).axis
    if axis is None or not is_rows(dims[of_rows]):
        return None
    if _product(out[:axis]) != _product(dims[:of_rows]):
        return None
    return look.each([OWN, shape_of(axis)], rows(axis))


@rule("ExpandDims")
def expand(look: Look) -> Each | None:
    """Adds an axis of size 1."""
    if look.fact(0) == PART:
        return look.linear()
    place, out = look.const(1), look.out()
    if look.fact(0).kind != "rows" or place is None or out is None:
        return None
    added = int(np.ravel(place)[0]) % len(out)
    return look.own_first(rows(look.fact(0).axis + (added <= look.fact(0).axis)))


@rule("Squeeze")
def squeeze(look: Look) -> Each | None:
    """Removes axes of size 1, which it names."""
    if look.fact(0) == PART:
        return look.linear()
    dims, named = look.dims(0), look.attr("squeeze_dims")
    if look.fact(0).kind != "rows" or dims is None or not named:
        return None
    removed = kept_axes(dims, named)
    axis = look.fact(0).axis
    return None if axis in removed else look.own_first(rows(axis - sum(r < axis for r in removed)))


@rule("Transpose")
def transpose(look: Look) -> Each | None:
    """Moves the axis of the rows."""
    if look.fact(0) == PART:
        return look.linear()
    order = look.const(1)
    if look.fact(0).kind != "rows" or order is None:
        return None
    return look.own_first(rows([int(axis) for axis in order].index(look.fact(0).axis)))


def _joined(look: Look, indices: range, axis_of_result: int | None, added: int) -> Each | None:
    """Answers for joining tensors of equal axes, along another axis than the rows' axis."""
    facts = [look.fact(i) for i in indices]
    rest = [WHOLE] * (len(look.inputs) - len(indices))
    if all(f == PART for f in facts):
        return look.each([OWN] * len(facts) + rest, PART)
    first = next((f for f in facts if f.kind == "rows"), None)
    out = look.out()
    if first is None or out is None or PART in facts:
        return None
    axis = first.axis + (axis_of_result is not None and axis_of_result <= first.axis and added)
    if not all((look.dims(i) or [()] * 99)[first.axis] == out[axis] for i in indices):
        return None
    return look.each([rows_of(first.axis)] * len(facts) + rest, rows(axis))


@rule("ConcatV2")
def concat(look: Look) -> Each | None:
    """Joins tensors along another axis than the rows' axis."""
    place, out = look.const(len(look.inputs) - 1), look.out()
    indices = range(len(look.inputs) - 1)
    if place is None or out is None:
        return None
    axis = int(place) % len(out)
    if any(look.fact(i) == rows(axis) for i in indices):
        return None
    return _joined(look, indices, None, 0)


@rule("Pack")
def pack(look: Look) -> Each | None:
    """Joins tensors along a new axis."""
    out = look.out()
    if out is None:
        return None
    return _joined(look, range(len(look.inputs)), look.attr("axis") % len(out), 1)


@rule("Unpack")
def unpack(look: Look) -> Each | None:
    """Takes a tensor apart along another axis than the rows' axis."""
    dims = look.dims(0)
    if look.fact(0) == PART:
        return look.own_first(PART)
    if look.fact(0).kind != "rows" or dims is None:
        return None
    axis, removed = look.fact(0).axis, look.attr("axis") % len(dims)
    return None if axis == removed else look.own_first(rows(axis - (removed < axis)))


@rule("Split")
def split(look: Look) -> Each | None:
    """Cuts a tensor along another axis than the rows' axis."""
    return _cut(look, 1, look.const(0))


@rule("SplitV")
def split_by_sizes(look: Look) -> Each | None:
    """Cuts a tensor along another axis than the rows' axis."""
    return _cut(look, 0, look.const(2))


def _cut(look: Look, index: int, place: Any) -> Each | None:
    fact, dims = look.fact(index), look.dims(index)
    needs = [OWN if i == index else WHOLE for i in range(len(look.inputs))]
    if fact == PART and place is not None:
        return look.each(needs, PART)
    if fact.kind != "rows" or place is None or dims is None:
        return None
    return None if int(place) % len(dims) == fact.axis else look.each(needs, fact)


@rule("ReverseV2", "Roll")
def moved(look: Look) -> Each | None:
    """Moves elements along other axes than the rows' axis."""
    axes, dims = look.const(len(look.inputs) - 1), look.dims(0)
    if look.fact(0).kind != "rows" or axes is None or dims is None:
        return None
    return None if look.fact(0).axis in kept_axes(dims, axes) else look.own_first()


def _keeps(look: Look, i: int, axis: int) -> bool:
    """Returns whether an input and the result have equal sizes at an axis."""
    dims, out = look.dims(i), look.out()
    return dims is not None and out is not None and dims[axis] == out[axis]


@rule("Slice")
def slice_(look: Look) -> Each | None:
    """Takes whole rows."""
    fact, begin = look.fact(0), look.values(1)
    if fact.kind != "rows" or begin is None or not look.is_size(2):
        return None
    axis = fact.axis
    if any(b[axis] != 0 for b in begin) or not _keeps(look, 0, axis):
        return None
    return look.each([OWN, WHOLE, shape_of(axis)], fact)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(look: Look) -> Each | None:
    """Adds elements along other axes than the rows' axis."""
    fact, paddings = look.fact(0), look.values(1)
    if fact.kind != "rows" or paddings is None or any(p[fact.axis].any() for p in paddings):
        return None
    return look.own_first()


def _sliced_axes(look: Look, dims: Any, first: int) -> dict[int, int] | None:
    """Returns, for a strided slice, where each axis that is kept whole is in the result.

    dims: the sizes of the sliced tensor. first: the index of the input `begin`, which `end` and
        `strides` follow.
    """
    begin, end, strides = (look.values(first + k) for k in range(3))
    sparse = next((look.inputs[first + k].shape for k in range(3)), None)
    if dims is None or sparse is None or sparse.rank is None or sparse[0] is None:
        return None
    masks = {name: look.attr(f"{name}_mask") for name in (
        "begin", "end", "ellipsis", "new_axis", "shrink_axis"
    )}  # fmt: skip
    count = sparse[0]
    has = {name: [bool(mask >> i & 1) for i in range(count)] for name, mask in masks.items()}
    given = sum(not has["new_axis"][i] and not has["ellipsis"][i] for i in range(count))
    axis = place = 0
    kept: dict[int, int] = {}
    for i in range(count):
        if has["ellipsis"][i]:
            for _ in range(len(dims) - given):
                kept[axis] = place
                axis, place = axis + 1, place + 1
        elif has["new_axis"][i]:
            place += 1
        elif has["shrink_axis"][i]:
            axis += 1
        else:
            at_start = has["begin"][i] or begin is not None and all(b[i] == 0 for b in begin)
            to_end = (
                has["end"][i]
                or end is not None
                and all(e[i] >= size for e, size in zip(end, dims[axis], strict=True))
            )
            if at_start and to_end and strides is not None and all(s[i] == 1 for s in strides):
                kept[axis] = place
            axis, place = axis + 1, place + 1
    for rest in range(axis, len(dims)):
        kept[rest] = place + rest - axis
    return kept


def _masked(look: Look, axis: int, rank: int) -> dict[str, int]:
    """Returns masks that say, besides, that all of an axis is taken, whatever begin and end are."""
    count = look.inputs[-1 if look.type == "StridedSlice" else -2].shape[0]
    ellipsis, new = look.attr("ellipsis_mask"), look.attr("new_axis_mask")
    given = sum(not (new >> i & 1 or ellipsis >> i & 1) for i in range(count))
    at = 0
    for i in range(count):
        if ellipsis >> i & 1:
            at += rank - given
        elif not new >> i & 1:
            if at == axis:
                return {k: look.attr(k) | 1 << i for k in ("begin_mask", "end_mask")}
            at += 1
    return {}


@rule("StridedSlice")
def strided_slice(look: Look) -> Each | None:
    """Takes whole rows."""
    if look.fact(0) == PART:
        return look.linear()
    fact, dims = look.fact(0), look.dims(0)
    kept = _sliced_axes(look, dims, 1)
    if fact.kind != "rows" or kept is None or fact.axis not in kept:
        return None
    masks = _masked(look, fact.axis, len(dims))
    return look.own_first(
        rows(kept[fact.axis]), emit=lambda context, op, values: context.copy(op, values, **masks)
    )


@rule("StridedSliceGrad")
def strided_slice_gradient(look: Look) -> Each | None:
    """Puts the gradient of whole rows back into their place."""
    fact, out = look.fact(4), look.out()
    if fact == PART and all(f == ONCE for f in look.facts()[:4]):
        return look.each([WHOLE] * 4 + [OWN], PART)
    kept = _sliced_axes(look, out, 1)
    if fact.kind != "rows" or kept is None or not look.is_size(0):
        return None
    axis = next((a for a, place in kept.items() if place == fact.axis), None)
    if axis is None or axis != look.only_rows_axis():
        return None
    masks = _masked(look, axis, len(out))
    return look.each(
        [shape_of(axis), WHOLE, WHOLE, WHOLE, OWN], rows(axis),
        emit=lambda context, op, values: context.copy(op, values, **masks),
    )  # fmt: skip


@rule("BroadcastTo", "Tile")
def repeated(look: Look) -> Each | None:
    """Repeats elements within rows, or a value without rows for each row."""
    dims, out, axis = look.dims(0), look.out(), look.only_rows_axis()
    if look.fact(0) == PART and out is not None and all(map(is_fixed, out)):
        return look.linear()
    if dims is None or out is None or axis is None or not look.is_size(1):
        return None
    own = axis - (len(out) - len(dims))
    if own >= 0 and dims[own] == out[axis]:  # the rows are there already
        if look.type == "Tile":
            return look.each([rows_of(own), WHOLE], rows(axis))
        return look.each([rows_of(own), shape_of(axis)], rows(axis))
    if look.fact(0) in (ONCE, PART) and (own < 0 or set(dims[own]) == {1}):
        return look.each([WHOLE, shape_of(axis)], rows(axis))
    return None


@rule("Fill")
def fill(look: Look) -> Each | None:
    """Repeats a value for each row."""
    axis = look.only_rows_axis()
    if axis is None or not look.is_size(0) or look.fact(1) != ONCE:
        return None
    return look.each([shape_of(axis), WHOLE], rows(axis))


@rule("OneHot")
def one_hot(look: Look) -> Each | None:
    """Adds an axis with a one at each index."""
    out = look.out()
    if look.fact(0).kind != "rows" or out is None:
        return None
    added = look.attr("axis") % len(out)
    return look.own_first(rows(look.fact(0).axis + (added <= look.fact(0).axis)))


@rule("GatherV2")
def gather(look: Look) -> Each | None:
    """Looks rows of indices up in a table, or chooses within rows."""
    table, indices, place = look.fact(0), look.fact(1), look.const(2)
    dims, at, batch = look.dims(0), look.dims(1), look.attr("batch_dims")
    if table == PART and indices == ONCE:
        return look.each([OWN, WHOLE, WHOLE], PART)
    if place is None or dims is None or at is None or PART in (table, indices):
        return None
    axis = int(place) % len(dims)
    if batch:
        of_rows = next((f.axis for f in (table, indices) if f.kind == "rows"), None)
        if of_rows is None or of_rows >= batch or dims[of_rows] != at[of_rows]:
            return None
        return look.each([rows_of(of_rows), rows_of(of_rows), WHOLE], rows(of_rows))
    if table == ONCE and indices.kind == "rows":
        return look.each([WHOLE, OWN, WHOLE], rows(axis + indices.axis))
    if table.kind == "rows" and indices == ONCE and table.axis != axis:
        moved_by = len(at) - 1 if table.axis > axis else 0
        return look.each([OWN, WHOLE, WHOLE], rows(table.axis + moved_by))
    return None


@rule("GatherNd")
def gather_nd(look: Look) -> Each | None:
    """Looks rows of indices up in a table."""
    at = look.dims(1)
    if look.fact(0) != ONCE or look.fact(1).kind != "rows" or at is None:
        return None
    return look.each([WHOLE, OWN], look.fact(1)) if look.fact(1).axis < len(at) - 1 else None
