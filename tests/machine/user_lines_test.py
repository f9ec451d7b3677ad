"""Which line of the user's code is at work."""

import inspect
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.machine.user_lines import current_line, is_of_keras, line_of, line_of_error

HERE = Path(__file__).name


def line_number():
    return inspect.currentframe().f_back.f_lineno


def test_the_current_line_is_the_innermost_outside_of_the_libraries():
    assert current_line() == f"{HERE}:{line_number()}"


def test_lines_of_keras_and_tensorflow_are_passed_over():
    found = []

    class Asks(keras.layers.Layer):
        def call(self, x):
            found.append(tf.nest.map_structure(lambda _: current_line(), 1))
            return x

    Asks()(tf.ones([1, 2]))
    assert found == [f"{HERE}:{inspect.getsourcelines(Asks)[1] + 2}"]


def test_an_operation_knows_the_line_that_made_it():
    with tf.Graph().as_default():
        made = keras.ops.square(tf.compat.v1.placeholder(tf.float32, [2])); line = line_number()  # noqa: E702,E501
    assert line_of(made.op) == f"{HERE}:{line}"


def reshape():
    return np.reshape(np.zeros(3), (2, 2))


def test_an_error_knows_the_innermost_line_that_it_or_its_cause_came_through():
    """NumPy's own lines lie further in."""
    with pytest.raises(ValueError) as caught:
        reshape()
    line = f"{HERE}:{inspect.getsourcelines(reshape)[1] + 1}"
    assert line_of_error(caught.value) == line
    error = ValueError("of a library's")
    assert line_of_error(error) is None
    error.__cause__ = caught.value
    assert line_of_error(error) == line


def test_what_keras_own_layers_make_is_told_from_what_a_user_writes_in_one():
    made = {}

    class Squares(keras.layers.Layer):
        def call(self, x):
            return keras.ops.square(x)

    def body(x):
        for layer in (keras.layers.LayerNormalization(scale=False, center=False), Squares()):
            made[type(layer).__name__] = layer(x).op

    with tf.Graph().as_default():
        body(tf.compat.v1.placeholder(tf.float32, [None, 2]))
    assert is_of_keras(made["LayerNormalization"], "layers")
    assert not is_of_keras(made["Squares"], "layers")
    assert not is_of_keras(made["LayerNormalization"], "metrics")
