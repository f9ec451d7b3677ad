"""Sums over bits: each bit and each place counts, and the devices do not."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from towers.step.digests import as_digits, sum_of_bits

MASK = 2**64 - 1
DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")


def odd(number):
    """splitmix64 in Python's integers: the outputs of a generator whose state is 0."""
    z = number * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ _shifted(z, 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ _shifted(z, 27)) * 0x94D049BB133111EB & MASK
    return (z ^ _shifted(z, 31)) | 1


def _shifted(z, by):
    """A shift of a signed integer keeps its sign."""
    return (z - (z >> 63 << 64)) >> by & MASK


def expected(tensors):
    total = 0
    for k, array in enumerate(tensors):
        words = array.astype("int8") if array.dtype == bool else array
        words = words.view({1: "int8", 2: "int16"}.get(words.itemsize, "int32"))
        table = words.reshape(len(array), -1).tolist()
        found = sum(
            odd(2 * r + 1) * odd(2 * c + 2) * value
            for r, row in enumerate(table)
            for c, value in enumerate(row)
        )
        total += odd(2 * k + 1) * (found + sum(map(len, table)))
    return f"{total & MASK:016x}"


def found(*tensors):
    return as_digits(sum_of_bits(list(map(tf.convert_to_tensor, tensors))))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_sum_is_that_of_python_integers_and_each_bit_counts(data):
    draw = data.draw
    shapes = arrays.array_shapes(min_dims=1, max_dims=3, max_side=4)
    one = arrays.arrays(draw(st.sampled_from(DTYPES)), shapes)
    tensors = draw(st.lists(one, min_size=1, max_size=3))
    before = found(*tensors)
    assert before == expected(tensors)
    other = draw(st.sampled_from(tensors))
    if other.dtype == bool:
        other[(0,) * other.ndim] ^= True
    else:
        place = draw(st.integers(0, other.nbytes * 8 - 1))
        other.reshape(-1).view("uint8")[place // 8] ^= 1 << place % 8
    assert found(*tensors) != before


def test_examples_that_change_places_show_for_images_and_for_one_hot_labels():
    x = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1)).astype("uint8")
    one_hot = np.eye(10, dtype="float32")
    seen = {found(x, one_hot)}
    for i in range(1, 10):
        order = np.arange(10)
        order[[0, i]] = order[[i, 0]]
        seen |= {found(x[order], one_hot), found(x, one_hot[order])}
    assert len(seen) == 1 + 9 + 9
    table = one_hot[[1, 2, 0, *range(3, 10)]]
    assert found(table) != found(table.T.copy())


def test_a_text_a_ragged_row_and_added_zeros_count():
    ragged = tf.ragged.constant([[1, 2], [3]])
    sums = {
        as_digits(sum_of_bits(value))
        for value in (
            {"a": tf.constant(["x", "y"])},
            {"a": tf.constant(["y", "x"])},
            (ragged, None),
            (tf.ragged.constant([[1], [2, 3]]), None),
            tf.zeros([2]),
            tf.zeros([3]),
        )
    }
    assert len(sums) == 6
    assert as_digits(sum_of_bits(None)) == as_digits(sum_of_bits([])) == "0" * 16


@pytest.mark.parametrize("device", ["/cpu:0", "/cpu:3"])
def test_a_sum_is_computed_where_the_value_is(device):
    value = np.random.default_rng(0).normal(size=(64, 33)).astype("float32")
    with tf.device(device):
        variable = tf.Variable(value)

    @tf.function(autograph=False)
    def total():
        with tf.device(variable.device):
            return sum_of_bits(variable.read_value())

    graph = total.get_concrete_function().graph
    products = [op.device for op in graph.get_operations() if op.type == "Bitcast"]
    assert products and all(device.upper()[1:] in place.upper() for place in products)
    assert as_digits(total()) == expected([value])
