"""The digest of a traced step: operations and constants count, names and devices do not."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.divide.program import program_digest

L = keras.layers
SPECS = tf.TensorSpec([None, 5, 3]), tf.TensorSpec([None], tf.int32), None


def digest(units=4, rate=0.5, activation="tanh", loss="sparse_categorical_crossentropy", **step):
    """The program of a GRU, whose loop is a function inside of the graph."""
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            L.GRU(units, activation=activation, recurrent_activation="hard_sigmoid"),
            L.Dropout(rate),
            L.Dense(3, activation="softmax"),
        ]
    )
    made = towers.TowerStep(model, keras.optimizers.Adam(0.01), loss, **step)
    graph, _ = made.steps.divided["train"].prepare(SPECS)
    return program_digest(graph)


@pytest.fixture(scope="module")
def plain():
    return digest()


def test_names_devices_and_towers_change_nothing(plain):
    L.Dense(3), L.GRU(2)  # Keras counts the names of layers
    devices = ["/cpu:0", "/cpu:1", "/cpu:2"]
    assert plain == digest(devices=devices, num_towers=6) == digest(devices=devices[:1])


@pytest.mark.parametrize(
    "change",
    [
        {"units": 5},
        {"rate": 0.4},
        {"activation": "relu"},
        {"loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=0)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_size_a_constant_an_operation_in_a_loop_and_a_loss_count(plain, change):
    assert digest(**change) != plain


def test_the_shape_of_a_variable_counts_even_if_no_operation_shows_it():
    digests = set()
    for size in (3, 4, 3):
        variable = tf.Variable(tf.zeros([size]))
        made = tf.function(lambda v=variable: v + 1.0).get_concrete_function()
        digests.add(program_digest(made.graph))
    assert len(digests) == 2


def test_only_the_value_of_a_constant_differs():
    def graph(value):
        return tf.function(lambda: tf.constant(value)).get_concrete_function().graph

    first, second = np.float32(1), np.nextafter(np.float32(1), np.float32(2))
    assert program_digest(graph(first)) == program_digest(graph(first))
    assert program_digest(graph(first)) != program_digest(graph(second))
