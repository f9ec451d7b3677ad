"""Where the batch axis of a tensor is after an operation."""

import pytest
import tensorflow as tf

from towers.graph.axes import (

    axis_like,

    contracted,

    open_axis,

    reduced_axes,

    regrouped,

    takes_all,

    transposed,

)
from towers.graph.facts import SHARED


@pytest.fixture(name="place", autouse=True)
def _place():
    with tf.Graph().as_default():
        yield tf.compat.v1.placeholder


def test_the_open_axis_is_the_batchs(place):
    assert open_axis(place(tf.float32, [3, None])) == 1
    assert open_axis(place(tf.float32, [None, None]), 1) == 1
    assert open_axis(place(tf.float32, [3])) is None
    assert open_axis(place(tf.float32)) == -1


def test_the_axis_is_found_again_in_another_shape(place):
    steps = place(tf.float32, [None, None, 3])
    assert axis_like(steps, steps[:, tf.newaxis], 1) == 2
    assert axis_like(steps, tf.transpose(steps, [2, 0, 1]), 0) == 1
    assert transposed(tf.transpose(steps, [1, 0, 2]).op, 0) == 1


def test_rows_are_regrouped_by_the_fixed_sizes(place):
    flat, pairs = place(tf.float32, [None, 4]), place(tf.float32, [None, 2, 4])
    assert regrouped(1, pairs, flat) == 2
    assert regrouped(2, flat, pairs) == 1
    assert regrouped(1, flat, pairs) is None  # half of one


def test_axes_are_counted_from_0(place):
    x = place(tf.float32, [None, 4])
    assert reduced_axes(tf.reduce_sum(x, axis=-1).op) == [1]
    assert reduced_axes(tf.reduce_sum(x).op) == [0, 1]


def test_a_slice_of_other_axes_takes_all_rows(place):
    x = place(tf.float32, [None, 4, 5])
    for rows in (x[:, 1:], x[..., 0], x[:, tf.newaxis, 2], x[tf.newaxis, :]):
        assert takes_all(rows.op, 0, [])
    for rows in (x[1:], x[0], x[::-1], x[:2]):
        assert not takes_all(rows.op, 0, [SHARED] * 4)


@pytest.mark.parametrize("equation, axes, expected", [
    ("bi,bj->bij", (0, 0), (False, 0)), ("bi,bi->", (0, 0), (True, None)),
    ("bi,cj->bc", (0, 0), (False, None)), ("...i,ij->...j", (0, None), (False, 0)),
])
def test_a_product_adds_up_rows_or_keeps_them(place, equation, axes, expected):
    terms = equation.split("->")[0].split(",")
    inputs = [place(tf.float32, [None] * len(t.replace("...", "b"))) for t in terms]
    assert contracted(tf.einsum(equation, *inputs).op, axes) == expected


def test_matrices_are_products_too(place):
    x = place(tf.float32, [None, 4])
    assert contracted(tf.matmul(x, x, transpose_a=True).op, [0, 0]) == (True, None)
    assert contracted(tf.matmul(x, x, transpose_b=True).op, [0, 0]) == (False, None)
    assert contracted(tf.matmul(x, tf.ones([4, 2])).op, [0, None]) == (False, 0)
