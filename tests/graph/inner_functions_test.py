"""Functions, conditions and loops in a graph."""

import keras
import pytest
import tensorflow as tf

from tests.graph.kinds import kind_of


def summed(body):
    """What 3 rounds of a loop add up."""
    return lambda x: tf.while_loop(
        lambda i, total: i < 3, lambda i, total: (i + 1, body(total, x)), [0, 0.0])[1]


MEANS = [
    lambda x: 2 * tf.function(lambda v: tf.reduce_mean(v**2))(x),
    lambda x: tf.cond(tf.random.uniform([]) > 0.5, lambda: tf.reduce_mean(x), lambda: 0.0),
    lambda x: tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum(row**2), x)),
    lambda x: tf.reduce_mean(tf.vectorized_map(lambda row: tf.reduce_sum(2 * row), x)),
    lambda x: tf.reduce_mean(tf.scan(lambda a, b: 0.5 * a + b, tf.transpose(x))[-1]),
    summed(lambda total, x: total + tf.reduce_mean(x)),
    lambda x: keras.losses.CTC()(
        tf.ones([tf.shape(x)[0], 2]), tf.tile(x[:, None], [1, 20, 1])),
]
OTHERS = [
    lambda x: 2 * tf.function(lambda v: tf.sqrt(tf.reduce_mean(v**2)))(x),
    lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: tf.reduce_mean(x), lambda: 0.0),
    lambda x: tf.reduce_mean(tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: 2 * x)),
    lambda x: tf.cond(tf.random.uniform([]) > 0.5, lambda: tf.reduce_mean(x),
                      lambda: tf.reduce_sum(x)),
    summed(lambda total, x: (total + tf.reduce_mean(x)) ** 2),
]


@pytest.mark.parametrize("make", MEANS)
def test_means_are_found_in_functions_conditions_and_loops(make):
    assert kind_of(make).name == "mean"


@pytest.mark.parametrize("make", OTHERS)
def test_faults_are_found_in_functions_conditions_and_loops(make):
    assert kind_of(make).name == "other"


@pytest.mark.parametrize("cls", [keras.layers.LSTM, keras.layers.GRU])
def test_recurrent_layers_work_row_by_row(cls):
    layer = cls(2, return_sequences=True)
    layer.build((None, 3, 1))
    assert kind_of(lambda x: tf.reduce_mean(layer(x[:, :, None]))).name == "mean"


def test_a_sum_in_a_function_is_a_sum():
    assert kind_of(lambda x: tf.function(tf.reduce_sum)(x) / 8.0).name == "sum"
