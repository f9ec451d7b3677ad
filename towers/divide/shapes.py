"""Rules of operations that move elements: they change shapes, choose, join and repeat."""

from collections.abc import Callable

import numpy as np

from towers.divide.facts import OWN, PART, WHOLE, Each, blocks, rows, rows_of, shape_of
from towers.divide.probes import ROWS, is_fixed
from towers.divide.rule import FIRST, Dims, Look, kept_axes, rule, rule_of_rows


def _product(dims: Dims) -> tuple[int, ...]:
    """Returns the product of sizes at each probe."""
    ones = (1,) * len(ROWS)
    return tuple(int(np.prod(column, dtype=object)) for column in zip(ones, *dims))


@rule_of_rows("Reshape", is_linear=True)
def reshape(look: Look) -> Each | None:
    """Keeps rows together, if as many elements come before the axis of the rows as after it."""
    axis = look.only_rows_axis()
    if axis is None:
        return None
    if _product(look.out()[:axis]) != _product(look.dims(0)[: look.fact(0).axis]):
        return None
    return look.each([OWN, shape_of(axis)], rows(axis))


@rule_of_rows("ExpandDims", is_linear=True)
def expand(look: Look) -> Each | None:
    """Adds an axis of size 1."""
    added = int(np.ravel(look.const(1))[0]) % len(look.out())
    return look.own_first(rows(look.fact(0).axis + (added <= look.fact(0).axis)))


@rule_of_rows("Squeeze", is_linear=True)
def squeeze(look: Look) -> Each | None:
    """Removes axes of size 1, which it names: else a batch of one row would lose its axis, too."""
    named, axis = look.attr("squeeze_dims"), look.fact(0).axis
    if not named:
        return None
    return look.own_first(rows(axis - sum(r < axis for r in kept_axes(look.dims(0), named))))


@rule_of_rows("Transpose", is_linear=True)
def transpose(look: Look) -> Each | None:
    """Moves the axis of the rows."""
    return look.own_first(rows([int(axis) for axis in look.const(1)].index(look.fact(0).axis)))


@rule_of_rows("SpaceToBatchND")
def to_blocks(look: Look) -> Each | None:
    """Makes several images of each image, as before a dilated convolution: a block of each."""
    sizes = look.const(1)
    if sizes is None or look.fact(0) != FIRST:
        return None
    return look.own_first(blocks(int(np.prod(sizes))))


@rule("BatchToSpaceND")
def from_blocks(look: Look) -> Each | None:
    """Makes one image of the images in several blocks, as after a dilated convolution."""
    sizes = look.const(1)
    if sizes is None or look.fact(0) != blocks(int(np.prod(sizes))):
        return None
    return look.own_first(FIRST)


def _joined(look: Look, indices: range, place: Callable[[int], int | None]) -> Each | None:
    """Answers for joining tensors. place: where an axis of theirs is in the result, or None."""
    facts = [look.fact(i) for i in indices]
    rest = [WHOLE] * (len(look.inputs) - len(indices))
    if set(facts) == {PART}:
        return look.each([OWN] * len(facts) + rest, PART)
    of_rows = next((f.axis for f in facts if f.kind == "rows"), None)
    if of_rows is None:
        return None
    axis = place(of_rows)
    if axis is None:
        return None
    return look.each([rows_of(of_rows)] * len(facts) + rest, rows(axis))


@rule("ConcatV2")
def concat(look: Look) -> Each | None:
    """Joins tensors along another axis than the rows' axis."""
    axis = int(look.const(len(look.inputs) - 1)) % len(look.out())
    return _joined(
        look, range(len(look.inputs) - 1), lambda of_rows: None if of_rows == axis else of_rows
    )


@rule("Pack")
def pack(look: Look) -> Each | None:
    """Joins tensors along a new axis."""
    axis = look.attr("axis") % len(look.out())
    return _joined(look, range(len(look.inputs)), lambda of_rows: of_rows + (axis <= of_rows))


@rule_of_rows("Unpack", is_linear=True)
def unpack(look: Look) -> Each | None:
    """Takes a tensor apart, which it cannot along the rows' axis: their number is open."""
    axis, removed = look.fact(0).axis, look.attr("axis") % len(look.dims(0))
    return look.own_first(rows(axis - (removed < axis)))


@rule("Split")
def split(look: Look) -> Each | None:
    """Cuts a tensor along another axis than the rows' axis."""
    return _cut(look, 1, look.const(0))


@rule("SplitV")
def split_by_sizes(look: Look) -> Each | None:
    """Cuts a tensor along another axis than the rows' axis."""
    return _cut(look, 0, look.const(2))


def _cut(look: Look, index: int, place: np.ndarray) -> Each | None:
    fact = look.fact(index)
    needs = [OWN if i == index else WHOLE for i in range(len(look.inputs))]
    if fact == PART:
        return look.each(needs, PART)
    is_cut = int(place) % len(look.dims(index)) == fact.axis
    if is_cut:
        return None
    return look.each(needs, fact)


@rule_of_rows("ReverseV2", "Roll")
def moved(look: Look) -> Each | None:
    """Moves elements along other axes than the rows' axis."""
    axes = look.const(len(look.inputs) - 1)
    if axes is None or look.fact(0).axis in kept_axes(look.dims(0), axes):
        return None
    return look.own_first()


def _keeps_rows(look: Look) -> bool:
    """Returns whether the axis of rows is as long as before."""
    axis = look.fact(0).axis
    return look.dims(0)[axis] == look.out()[axis]


@rule_of_rows("Slice")
def slice_(look: Look) -> Each | None:
    """Takes whole rows."""
    if not _keeps_rows(look):
        return None
    return look.each([OWN, WHOLE, shape_of(look.fact(0).axis)], look.fact(0))


@rule_of_rows("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(look: Look) -> Each | None:
    """Adds elements along other axes than the rows' axis."""
    if _keeps_rows(look):
        return look.own_first()
    return None


def _sliced_axes(look: Look, before: Dims, after: Dims, first: int) -> dict[int, int]:
    """Returns, for a strided slice, where each axis that is kept whole is in the result.

    before, after: sizes of the tensor and of the slice. first: the index of the input `begin`,
        which `end` and `strides` follow.
    """
    strides = look.values(first + 2)
    ((count, *_),) = look.dims(first)
    masks = {name: look.attr(f"{name}_mask") for name in (
        "begin", "end", "ellipsis", "new_axis", "shrink_axis"
    )}  # fmt: skip
    # Each mask has one bit for each entry of `begin`, in order.
    has = {name: [bool(mask >> i & 1) for i in range(count)] for name, mask in masks.items()}
    given = sum(not has["new_axis"][i] and not has["ellipsis"][i] for i in range(count))
    axis = place = 0
    kept: dict[int, int] = {}
    for i in range(count):
        if has["ellipsis"][i]:
            for _ in range(len(before) - given):
                kept[axis] = place
                axis, place = axis + 1, place + 1
        elif has["new_axis"][i]:
            place += 1
        elif has["shrink_axis"][i]:
            axis += 1
        else:
            # With a negative stride the axis is as long as before, and its rows are reversed.
            goes_up = strides is not None and strides[0][i] > 0
            if goes_up and before[axis] == after[place]:
                kept[axis] = place
            axis, place = axis + 1, place + 1
    for rest in range(axis, len(before)):
        kept[rest] = place + rest - axis
    return kept


@rule_of_rows("StridedSlice", is_linear=True)
def strided_slice(look: Look) -> Each | None:
    """Takes whole rows. An end behind a tower's last row is cut."""
    place = _sliced_axes(look, look.dims(0), look.out(), 1).get(look.fact(0).axis)
    if place is None:
        return None
    return look.own_first(rows(place))


@rule("StridedSliceGrad")
def strided_slice_gradient(look: Look) -> Each | None:
    """Puts the gradient of whole rows back into their place."""
    fact = look.fact(4)
    if fact == PART:
        return look.each([WHOLE] * 4 + [OWN], PART)
    kept = _sliced_axes(look, look.out(), look.dims(4), 1)
    axis = next((a for a, place in kept.items() if rows(place) == fact), None)
    if axis is None:
        return None
    return look.each([shape_of(axis), WHOLE, WHOLE, WHOLE, OWN], rows(axis))


@rule("BroadcastTo", "Tile")
def repeated(look: Look) -> Each | None:
    """Repeats elements within rows, or a value without rows for each row."""
    dims, out, axis = look.dims(0), look.out(), look.only_rows_axis()
    if look.fact(0) == PART and all(map(is_fixed, out)):
        return look.linear()
    if axis is None:
        return None
    own = axis - (len(out) - len(dims))
    if own >= 0 and dims[own] == out[axis]:  # the rows are there already
        sizes = WHOLE if look.type == "Tile" else shape_of(axis)
        return look.each([rows_of(own), sizes], rows(axis))
    if own < 0 or is_fixed(dims[own]):
        return look.each([WHOLE, shape_of(axis)], rows(axis))
    return None


@rule("Fill")
def fill(look: Look) -> Each | None:
    """Repeats a value for each row."""
    axis = look.only_rows_axis()
    if axis is None:
        return None
    return look.each([shape_of(axis), WHOLE], rows(axis))


@rule_of_rows("OneHot")
def one_hot(look: Look) -> Each | None:
    """Adds an axis with a one at each index."""
    added = look.attr("axis") % len(look.out())
    return look.own_first(rows(look.fact(0).axis + (added <= look.fact(0).axis)))
