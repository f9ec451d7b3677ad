"""Every rule of shapes.py by itself: whole and divided among towers."""

import pytest
import tensorflow as tf

from tests.divide.whole_and_divided import (
    IMAGE,
    N3,
    N34,
    R,
    T3N4,
    Cases,
    assert_alike,
    gradient_of,
    kinds_without,
)
from towers.divide import shapes
from towers.divide.rule import RULES

CASES = Cases()
add, add_once = CASES.add, CASES.add_once


def _in_fours(x: tf.Tensor) -> tf.Tensor:
    """The number of rows, rounded up to a multiple of four."""
    return (tf.shape(x)[0] + 3) // 4 * 4


def _at_most_five(x: tf.Tensor) -> tf.Tensor:
    """The number of rows, or five."""
    return tf.reduce_sum(tf.cast(tf.range(tf.shape(x)[0]) < 5, tf.int32))


def _by_size(x: tf.Tensor, many: int, few: int) -> tf.Tensor:
    """The number of rows times `many`, or times `few` if it is at most five."""
    count = tf.shape(x)[0]
    return count * tf.where(count > 5, many, few)


def _shape_twice(x: tf.Tensor) -> tf.Tensor:
    """Reads one shape as a tower has it, and as the batch has it."""
    shape = tf.shape(x)
    return tf.reshape(tf.exp(x), shape) + tf.reduce_sum(tf.cast(shape, x.dtype))


add("Reshape", _shape_twice, N34)
add("Reshape", lambda x: tf.reshape(x, [-1, 12]), N34)
add("Reshape", lambda x: tf.reshape(x, [-1, 4]), N34)
add("Reshape", lambda x: tf.reshape(tf.reshape(x, [-1, 4]), [-1, 3, 4]), N34)
add("Reshape", lambda x: tf.reshape(x, [3, -1, 2, 2]), T3N4)
add("Reshape", lambda x: tf.reshape(x, [1, -1, 12]), N34)
add("Reshape", lambda x: tf.reshape(x, [-1, 12]), (1, "n", 12))
add_once("Reshape", lambda x: tf.reshape(x, [4, -1, 3]), N34)
add_once("Reshape", lambda x: tf.reshape(x, [-1, 4]), T3N4)
add_once("Reshape", lambda x: tf.reshape(x, [-1, tf.shape(x)[0]]), N3)
add("ExpandDims", lambda x: tf.expand_dims(x, 0), N3)
add("ExpandDims", lambda x: tf.expand_dims(x, -1), N3)
add("ExpandDims", lambda x: tf.expand_dims(tf.reduce_sum(x, 0), 0), N3)
add("Squeeze", lambda x: tf.squeeze(x, 1), ("n", 1, 3))
add("Squeeze", lambda x: tf.squeeze(x, 0), (1, "n", 3))
add("Squeeze", lambda x: tf.squeeze(tf.reduce_sum(x, 0, keepdims=True), 0), N3)
add("Transpose", lambda x: tf.transpose(x, [1, 2, 0]), N34)
add("Transpose", lambda x: tf.transpose(tf.reduce_sum(x, 0)), N34)
add("ConcatV2", lambda x, y: tf.concat([x, y], 1), N3, N3)
add_once("ConcatV2", lambda x, y: tf.concat([x, y], 0), N3, N3)
add_once("ConcatV2", lambda x, y: tf.concat([x, y], 0), N3, (2, 3))
add("ConcatV2", lambda x, y: tf.concat([tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)], 0), N3, N3)
add("Pack", lambda x, y: tf.stack([x, y], 0), N3, N3)
add("Pack", lambda x, y: tf.stack([x, y], 1), T3N4, T3N4)
add("Pack", lambda x, y: tf.stack([x, y], -1), T3N4, T3N4)
add("Pack", lambda x, y: tf.stack([tf.reduce_sum(x), tf.reduce_sum(y)]), N3, N3)
add("Unpack", lambda x: tf.unstack(x, axis=1), N34)
add("Unpack", lambda x: tf.unstack(x, axis=0), T3N4)
add("Unpack", lambda x: tf.unstack(tf.reduce_sum(x, 0)), N34)
add("Split", lambda x: tf.split(x, 2, 2), N34)
add("Split", lambda x: tf.split(tf.reduce_sum(x, 0), 2, 1), N34)
add("SplitV", lambda x: tf.split(x, [1, 3], 2), N34)
add("ReverseV2", lambda x: tf.reverse(x, [1]), N34)
add_once("ReverseV2", lambda x: tf.reverse(x, [0]), N34)
add("Roll", lambda x: tf.roll(x, 1, 1), N34)
add_once("Roll", lambda x: tf.roll(x, 1, 0), N34)
add("Slice", lambda x: tf.slice(x, [0, 1, 0], [-1, 2, 3]), N34)
add_once("Slice", lambda x: tf.slice(x, [1, 0, 0], [-1, 2, 3]), N34)
add("Slice", lambda x: tf.slice(x, [0, 0], [tf.shape(x)[0], 2]), N3)
add("Pad", lambda x: tf.pad(x, [[0, 0], [1, 2]]), N3)
add_once("Pad", lambda x: tf.pad(x, [[1, 0], [1, 2]]), N3)
add("PadV2", lambda x: tf.pad(x, [[0, 0], [1, 2]], constant_values=7), N3)
add("MirrorPad", lambda x: tf.pad(x, [[0, 0], [1, 1]], "REFLECT"), N3)
add(
    "MirrorPadGrad",
    lambda x: R.MirrorPadGrad(input=x, paddings=[[0, 0], [1, 1]], mode="REFLECT"),
    ("n", 5),
)
add("StridedSlice", lambda x: x[:, 1:], N34)
add("StridedSlice", lambda x: x[:, 0], N34)
add("StridedSlice", lambda x: x[0], T3N4)
add("StridedSlice", lambda x: x[..., None, 1], N34)
add("StridedSlice", lambda x: x[None, :, ::2], N34)
add("StridedSlice", lambda x: x[0 : tf.shape(x)[0], :2], N34)
add_once("StridedSlice", lambda x: x[1:], N34)
add_once("StridedSlice", lambda x: x[::2], N34)
add_once("StridedSlice", lambda x: x[::-1], N34)
add_once("StridedSlice", lambda x: x[: tf.shape(x)[0] // 2], N34)
add_once("StridedSlice", lambda x: x[: tf.shape(x)[0] // 2 * 2], N34)
add_once("StridedSlice", lambda x: x[: _by_size(x, 1, 0)], N34)
add_once("StridedSlice", lambda x: x[: _at_most_five(x)], N34)
add_once("StridedSlice", lambda x: x[0], N34)
add("StridedSlice", lambda x: tf.reduce_sum(x, 0)[1:], N34)

add("Slice", gradient_of(lambda x: tf.concat([x, x * x], 2)), N34)
add("StridedSliceGrad", gradient_of(lambda x: x[:, 1:]), N34)
add("StridedSliceGrad", gradient_of(lambda x: x[0]), T3N4)
add_once("StridedSliceGrad", gradient_of(lambda x: x[1:]), N34)
add_once("StridedSliceGrad", gradient_of(lambda x: x[0]), N34)
add("BroadcastTo", lambda x: tf.broadcast_to(x, tf.shape(tf.stack([x, x]))), N3)
add("BroadcastTo", lambda x, y: tf.broadcast_to(y, tf.shape(x)), N3, (3,))
add("BroadcastTo", lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), tf.shape(x)), N3)
add("BroadcastTo", lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), [2, 3]), N3)
add("BroadcastTo", lambda x: tf.broadcast_to(x[:1], tf.shape(x)), N3, divided=None)
add("Tile", lambda x: tf.tile(x, [1, 2]), N3)
add_once("Tile", lambda x: tf.tile(x, [2, 1]), N3)
add("Tile", lambda x, y: tf.tile(y[None], [tf.shape(x)[0], 1]), N3, (3,))
add("Tile", lambda x: tf.tile(tf.reduce_sum(x, 0), [2]), N3)
add("Fill", lambda x, y: tf.fill(tf.shape(x), y), N3, ())
add_once("Fill", lambda x, y: tf.fill([tf.shape(x)[0], tf.shape(x)[0]], y), N3, ())
add_once("Fill", lambda x, y: tf.fill([tf.maximum(tf.shape(x)[0], 3)], y), N3, ())
add_once("Fill", lambda x, y: tf.fill([_in_fours(x)], y), N3, ())
add_once("Fill", lambda x, y: tf.fill([_by_size(x, 1, 2)], y), N3, ())
add("OneHot", lambda i: tf.one_hot(tf.cast(i, tf.int32), 4), N3, fill="labels")
add("OneHot", lambda i: tf.one_hot(tf.cast(i, tf.int32), 4, axis=0), N3, fill="labels")


def _repeated(x: tf.Tensor) -> tf.Tensor:
    """Returns each row twice: as many rows as two batches have."""
    return tf.reshape(tf.stack([x, 2 * x], 1), [-1, 3])


def _zero(y: tf.Tensor) -> tf.Tensor:
    """Returns an integer that no shape tells."""
    return tf.cast(y * 0, tf.int32)


add_once(
    "Reshape",
    lambda x: tf.reshape(tf.reduce_sum(tf.cast(x, tf.int32), 0), [3, 1]),
    N3,
    extremes=(),
)
add_once("Squeeze", lambda x: tf.reshape(tf.squeeze(x), [-1, 3]), ("n", 1, 3))
add_once("Pack", lambda x, y: tf.stack([tf.reduce_sum(x, 0), y]), N3, (3,))
add(
    "ConcatV2",
    lambda x: tf.concat([x @ tf.transpose(x), tf.transpose(tf.sin(x @ tf.transpose(x)))], 1),
    N3,
)
add_once("Split", lambda x: tf.split(_repeated(x), 2), N3)
add_once("SplitV", lambda x: tf.split(_repeated(x), [tf.shape(x)[0]] * 2), N3)
add("SplitV", lambda x: tf.split(tf.reduce_sum(x, 0), [1, 2]), N3)
add_once("ReverseV2", lambda x, y: tf.reverse(x, [_zero(y)]), N3, (), extremes=())
add_once("Slice", lambda x: tf.slice(_repeated(x), [0, 0], tf.shape(x)), N3)
add_once("MirrorPad", lambda x: tf.pad(x, [[1, 1], [0, 0]], "SYMMETRIC"), N3)
add_once("StridedSlice", lambda x: _repeated(x)[: tf.shape(x)[0]], N3)
add_once("StridedSlice", lambda x: _repeated(x)[::2], N3)
add("StridedSlice", lambda x: x[0, ..., 1], T3N4)
add("StridedSlice", lambda x: x[None, ..., 1:], T3N4)
add_once("StridedSlice", lambda x: x[:, None, 0], T3N4)
add_once("StridedSlice", lambda x, y: x[:, _zero(y) :], N3, (), extremes=())
for cut in (
    lambda x: x[:, None, 1:],
    lambda x: x[..., 1],
    lambda x: x[None, :, ::2],
    lambda x: x[:, 0],
):
    add("StridedSliceGrad", gradient_of(cut), N34)
add_once("StridedSliceGrad", gradient_of(lambda x: x[::-1]), N34)
add_once("StridedSliceGrad", gradient_of(lambda x: _repeated(x)[: tf.shape(x)[0]]), N3)
add_once(
    "StridedSliceGrad",
    lambda x, y: R.StridedSliceGrad(
        shape=tf.shape(x), begin=[0, 0], end=tf.shape(x), strides=[_zero(y) + 1, 1], dy=x
    ),
    N3, (), extremes=(),
)  # fmt: skip
add(
    "StridedSliceGrad",
    lambda x: R.StridedSliceGrad(
        shape=[4], begin=[1], end=[4], strides=[1], dy=tf.reduce_sum(x, 0)
    ),
    N3,
)
add("Tile", lambda x, y: tf.tile(y, [tf.shape(x)[0], 1]), N3, (2, 3))
add("Tile", lambda x: tf.tile(tf.reduce_sum(x, 0), [tf.shape(x)[0]]), N3)
add("Fill", lambda x: tf.fill(tf.shape(x), tf.reduce_sum(x)), N3)
add(
    "Fill",
    lambda x, y: tf.fill(tf.shape(tf.reshape(x, [-1, 4])), y),
    ("n", "m", 4),
    (),
    divided=None,
)
add_once("Pad", lambda x: tf.pad(x, [[0, tf.shape(x)[0]], [0, 0]]), N3)
add("StridedSlice", lambda x: x[..., 0 : tf.shape(x)[1], 1:], T3N4)
add("StridedSlice", lambda x: x[None, 0 : tf.shape(x)[0], :2], N34)
add("StridedSlice", lambda x: x[..., None, 0 : tf.shape(x)[1], 1:], T3N4)
add("StridedSlice", lambda x: x[-tf.shape(x)[0] :, None, ..., 1], N34)
add("StridedSliceGrad", gradient_of(lambda x: x[-tf.shape(x)[0] : tf.shape(x)[0], 1:]), N34)
add_once("BroadcastTo", lambda x, y: x[:, :2] @ tf.broadcast_to(y, [2, 3]), N3, (3,))
add("BroadcastTo", lambda x, y: tf.broadcast_to(y, [tf.shape(x)[0], 2, 3]), N3, (3,))
add("Sin", lambda x: tf.sin(tf.broadcast_to(tf.reduce_sum(x, 0), tf.shape(x))), N3)


def _in_blocks(x: tf.Tensor, *block: int) -> tf.Tensor:
    """Returns [n, ...] as [blocks * n, ...], as before a dilated convolution."""
    return tf.space_to_batch(x, block, [[0, 0]] * len(block))


def _from_blocks(x: tf.Tensor, *block: int) -> tf.Tensor:
    return tf.batch_to_space(x, block, [[0, 0]] * len(block))


GRID = ("n", 4, 2)
for dilated, *rest in (
    (lambda x, w: tf.nn.convolution(x, w, padding="SAME", dilations=2), IMAGE, (3, 3, 2, 4)),
    (lambda x, w: tf.nn.convolution(x, w, dilations=2), GRID, (2, 2, 3)),
):
    add("SpaceToBatchND", dilated, *rest)
    for which in (0, 1):
        add("BatchToSpaceND", gradient_of(dilated, which), *rest)
    add("Conv2D", dilated, *rest)
    add("Conv2DBackpropInput", gradient_of(dilated), *rest)
    add("Conv2DBackpropFilter", gradient_of(dilated, 1), *rest)
add("SpaceToBatchND", lambda x: _in_blocks(x, 2, 3), IMAGE)
add_once("SpaceToBatchND", lambda x: _in_blocks(x, 1, 2), (2, "n", 4, 2))
add_once("SpaceToBatchND", lambda x: _in_blocks(x, tf.minimum(tf.shape(x)[0], 1), 2), IMAGE)
add("Sum", lambda x: tf.reduce_sum(tf.sin(_in_blocks(x, 2)), 0), GRID)
add("Mean", lambda x: tf.reduce_mean(_in_blocks(x, 2), 0), GRID)
add("Mul", lambda x: _in_blocks(x, 2) * tf.sin(_in_blocks(x, 2)), GRID)
add("Reshape", lambda x: tf.reshape(_in_blocks(x, 2), [-1, 4]), GRID)
add("Tile", lambda x: tf.tile(_in_blocks(x, 2), [1, 2, 1]), GRID)
add("BatchToSpaceND", lambda x: _from_blocks(tf.sin(_in_blocks(x, 2, 1)), 1, 2), IMAGE)
add_once(
    "BatchToSpaceND",
    lambda x: _from_blocks(_in_blocks(tf.reshape(x, [-1, 2, 2, 2]), 2, 1), 2, 2),
    ("n", 4, 2, 2),
)
add_once("BatchToSpaceND", lambda x: _from_blocks(tf.reshape(x, [-1, 2, 2]), 2), GRID)
# Blocks of rows, beside as many rows in order, whole rows, and other blocks.
add("AddV2", lambda x: _in_blocks(x, 2) + tf.reshape(x, [-1, 2, 2]), GRID)
add_once("AddV2", lambda x: _in_blocks(x, 2) + tf.sort(_in_blocks(x, 2), 0), GRID)
add_once(
    "AddV2", lambda x, y: _in_blocks(x, 4) + _in_blocks(tf.reshape(y, [-1, 2, 2]), 2), GRID, GRID
)
add_once("Reshape", lambda x: tf.reshape(_in_blocks(x, 2), [-1, 8]), GRID)
add_once("ReverseV2", lambda x: tf.reverse(_in_blocks(x, 2), [0]), GRID)


def _windows(x: tf.Tensor, size: int) -> tf.Tensor:
    """Groups of windows, whose number follows from that of all windows."""
    windows = tf.reshape(x, [-1, 4])
    return tf.reshape(windows, [tf.shape(windows)[0] // size, size, 4])


add("Sin", lambda x: tf.sin(_windows(x, 3)), N34)
add("Sin", lambda x: tf.sin(_windows(x, 9)), ("n", 27, 4))
add_once("Sin", lambda x: tf.sin(x[: 3 * tf.shape(x)[0] // 2]), N34)


@pytest.mark.parametrize(
    "cases", CASES.groups, ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_an_operation_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_has_a_case_that_is_divided():
    assert kinds_without(RULES, shapes, CASES) == set()
