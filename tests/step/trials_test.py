"""Models on made-up rows: a layer that computes across rows is found."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.cases import BUILT_IN, ODD
from towers.step.structures import any_rows, map_tensors
from towers.step.trials import check_rows_apart, made_up

L = keras.layers


class Across(L.Layer):
    """Adds what a function makes of the rows."""

    def __init__(self, function):
        super().__init__(name="across")
        self.function = function

    def call(self, x):
        return x + self.function(x)


def model_of(function):
    return keras.Sequential([
        keras.Input((6,)), L.Dense(9), L.BatchNormalization(), L.Dropout(0.5), Across(function)
    ])


def warned(model, *specs):
    """What the trial says."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        check_rows_apart(model, *(specs or [tf.TensorSpec([None, 6])]))
    return "".join(str(w.message) for w in found)


@pytest.mark.parametrize("function", [
    lambda x: tf.reduce_mean(x, axis=0), lambda x: tf.cumsum(x, axis=0, reverse=True),
    lambda x: tf.nn.softmax(x, axis=0), lambda x: tf.tensordot(x, x, 2), lambda x: x[::-1],
    lambda x: tf.matmul(tf.matmul(x, x, transpose_b=True), x), lambda x: tf.sort(x, axis=0),
])
def test_a_layer_that_computes_across_rows_is_warned_of(function):
    message = warned(model_of(function))
    assert "(across) computes across the rows of a batch" in message
    assert "towers.gather(rows)" in message


@pytest.mark.parametrize("function", [
    lambda x: tf.reduce_mean(x, axis=1, keepdims=True), tf.square,
    lambda x: tf.random.normal(tf.shape(x)), lambda x: keras.random.normal((9,), seed=3),
])
def test_dropout_batch_norm_noise_and_what_stays_in_a_row_pass(function):
    assert not warned(model_of(function))


def test_an_operation_of_a_functional_model_is_tried_too():
    x = keras.Input((6,))
    assert "across the rows" in warned(keras.Model(x, x - keras.ops.mean(x, axis=0)))
    assert not warned(keras.Model(x, x - keras.ops.mean(x, axis=1, keepdims=True)))


@pytest.mark.parametrize("case", BUILT_IN + ODD, ids=str)
def test_models_that_keep_rows_apart_pass(case):
    x, _, _ = case.batch(8, np.random.default_rng(0))
    assert not warned(case.build(), map_tensors(any_rows, x))


class Padded(L.Layer):
    """The mean over the steps of ragged rows, padded to the longest; `length`: to that length."""

    def __init__(self, length=None):
        super().__init__()
        self.length = length

    def compute_output_shape(self, shape):
        return (shape[0],)

    def call(self, x):
        return tf.reduce_mean(x.to_tensor(shape=[None, self.length]), axis=1)


def texts(**options):
    return L.TextVectorization(vocabulary=["a", "b"], **options)


RAGGED = tf.RaggedTensorSpec([None, None], tf.float32)


@pytest.mark.parametrize("layers, spec, is_across", [
    ([Padded], RAGGED, True),
    ([lambda: Padded(9)], RAGGED, False),
    ([lambda: L.Rescaling(2.0), lambda: L.Lambda(lambda x: x * 1.0)], RAGGED, False),
    ([texts], tf.TensorSpec([None], tf.string), True),
    ([lambda: texts(output_sequence_length=7)], tf.TensorSpec([None], tf.string), False),
    ([lambda: texts(ragged=True)], tf.TensorSpec([None], tf.string), False),
    ([texts, lambda: L.Embedding(4, 3, mask_zero=True), L.GlobalAveragePooling1D],
     tf.TensorSpec([None], tf.string), False),
    ([lambda: L.Lambda(tf.strings.upper, dtype="string")], tf.TensorSpec([None], tf.string), False),
], ids=["padded", "one length", "ragged", "texts", "texts of one length", "ragged texts", "masked",
        "strings"])
def test_rows_that_are_padded_to_the_longest_are_warned_of_unless_it_has_no_effect(
    layers, spec, is_across
):
    is_ragged = isinstance(spec, tf.RaggedTensorSpec)
    inputs = keras.Input(spec.shape[1:], dtype=spec.dtype.name, ragged=is_ragged)
    model = keras.Sequential([inputs, *(layer() for layer in layers)])
    message = warned(model, spec)
    assert ("to the longest row one length" in message) == is_across, message
    assert is_across or not message


def test_a_trial_changes_nothing():
    class Counts(L.Layer):
        def build(self, shape):
            self.own = tf.Variable(0.0)
            self.listed = self.add_weight(name="listed", initializer="zeros", trainable=False)

        def call(self, x):
            self.own.assign_add(tf.reduce_sum(x))
            self.listed.assign(self.listed + 1)
            return x

    model = keras.Sequential([keras.Input((6,)), Counts(), L.Dropout(0.5), RowMeanOf()])
    before = [v.numpy() for v in model.variables]
    assert not warned(model)
    assert float(model.layers[0].own) == 0
    for a, b in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


class RowMeanOf(L.Layer):
    def call(self, x):
        return tf.reduce_mean(x, axis=1)


def test_made_up_rows_fit_their_spec():
    ragged = made_up(tf.RaggedTensorSpec([None, None, 3], tf.int64, ragged_rank=1))
    assert ragged.shape.as_list() == [5, None, 3] and ragged.dtype == tf.int64
    assert made_up(tf.TensorSpec([None, None, 2])).shape == [5, 32, 2]
    nested = made_up(tf.RaggedTensorSpec([None, None, None, 2], ragged_rank=2))
    assert nested.ragged_rank == 2 and nested.shape.as_list() == [5, None, None, 2]
    sparse = made_up(tf.SparseTensorSpec([None, 4], tf.int64))
    assert sparse.shape == [5, 4] and 0 < sparse.values.shape[0] < 20
    words = made_up(tf.TensorSpec([None], tf.string)).numpy().tolist()
    assert words == [b"a"] * 3 + [b"a a a"] * 2
