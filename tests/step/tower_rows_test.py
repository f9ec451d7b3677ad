"""Models whose output for a row depends on other rows of the batch: warned of, with the line."""

import warnings

import keras
import pytest
import tensorflow as tf

from towers.step import TowerStep
from towers.step.checks import BatchInCode

L = keras.layers
TEXTS = ["a b", "b", "a", "a b a", "a", "b", "a", "a"]


class Of(L.Layer):
    """What a function makes of the rows."""

    def __init__(self, function):
        super().__init__(name="of")
        self.function = function

    def call(self, x):
        return self.function(x)


def warned(model, x):
    """What is said before the first step on two towers."""
    options = {"devices": ["/cpu:0"], "num_towers": 2, "batch_norm": "average"}
    step = TowerStep(model, "sgd", "mse", **options)
    y = tf.zeros([8, *model.output_shape[1:]])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step.trace_tower("train", x, y, None)
    return "".join(str(w.message) for w in found)


def of_rows(function):
    model = keras.Sequential([
        keras.Input((6,)), L.Dense(6), L.BatchNormalization(), L.Dropout(0.5), Of(function)
    ])
    return warned(model, tf.ones([8, 6]))


@pytest.mark.parametrize("function", [
    lambda x: x - tf.reduce_mean(x, axis=0), lambda x: x[::-1],
    lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: 2 * x),
    lambda x: tf.ensure_shape(tf.py_function(lambda v: v[::-1], [x], tf.float32), [None, 6]),
    lambda x: L.UnitNormalization(axis=0)(x),
])
def test_what_computes_across_rows_is_warned_of_with_its_line(function):
    message = of_rows(function)
    assert "Each tower has only its own rows of the batch" in message
    assert "towers.gather(rows)" in message and "tower_rows_test.py:" in message


@pytest.mark.parametrize("function", [
    lambda x: tf.reduce_mean(x, axis=1, keepdims=True), tf.square,
    lambda x: x + tf.random.normal(tf.shape(x)), lambda x: x + keras.random.normal((6,), seed=3),
    lambda x: tf.map_fn(lambda row: row / tf.reduce_max(row), x),
    lambda x: tf.reshape(tf.image.resize(tf.reshape(x, [-1, 2, 3, 1]), [4, 4]), [-1, 16]),
    lambda x: tf.abs(tf.signal.rfft(x)),
])
def test_batch_norm_noise_and_what_stays_in_a_row_pass(function):
    assert not of_rows(function)


def of_texts(*layers, **options):
    """Layers on texts as long as the longest of the batch."""
    vectors = L.TextVectorization(vocabulary=["a", "b"], **options)
    model = keras.Sequential([keras.Input((), dtype="string"), vectors, *layers])
    return warned(model, tf.constant(TEXTS))


PADDED = {
    "mean": lambda mask: [L.Embedding(4, 3, mask_zero=mask), L.GlobalAveragePooling1D()],
    "lstm": lambda mask: [L.Embedding(4, 3, mask_zero=mask), L.LSTM(3)],
}


@pytest.mark.parametrize("name", ["mean", "lstm"])
def test_what_computes_with_padding_is_warned_of_unless_it_is_masked_or_of_one_length(name):
    message = of_texts(*PADDED[name](False))
    assert "as long as the longest row of the batch" in message and "mask_zero=True" in message
    assert not of_texts(*PADDED[name](True))
    assert not of_texts(*PADDED[name](False), output_sequence_length=7)


@pytest.mark.parametrize("function, is_warned", [
    (lambda x: tf.reduce_sum(x, axis=1), False), (lambda x: x[:, 0], False),
    (lambda x: x[:, -1], True), (lambda x: tf.reduce_max(x, axis=1), True),
])
def test_padding_is_warned_of_only_where_its_length_has_an_effect(function, is_warned):
    assert bool(of_texts(L.Embedding(4, 3), Of(function))) == is_warned


@pytest.mark.parametrize("function", [
    lambda x: tf.reshape(x, [8, 6]) * 2, lambda x: x + tf.zeros([8, 6]),
])
def test_a_batch_size_in_the_code_of_a_layer_is_refused(function):
    with pytest.raises(BatchInCode, match="written into the code"):
        of_rows(function)
