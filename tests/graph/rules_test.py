"""What becomes of operations in general, and of what Keras' own layers do."""

import keras
import pytest
import tensorflow as tf

from tests.graph.kinds import kind_of

L = keras.layers


class Centered(L.Layer):
    """A user's layer inside of Keras' machinery."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


@pytest.mark.parametrize("make", [
    lambda: L.BatchNormalization(), lambda: L.Dropout(0.5, seed=1), lambda: L.LayerNormalization(),
    lambda: keras.Sequential([L.Reshape((3, 1)), L.Conv1D(2, 2), L.BatchNormalization()]),
    lambda: L.GaussianNoise(1.0, seed=1),
], ids=["batch_norm", "dropout", "layer_norm", "conv", "noise"])
def test_what_keras_own_layers_do_is_no_fault(make):
    layer = make()
    layer.build((None, 3))
    assert kind_of(lambda x: tf.reduce_mean(layer(x, training=True))).name == "mean"


def test_attention_compares_no_rows():
    layer = L.MultiHeadAttention(2, 3)
    layer.build((None, 3, 1), (None, 3, 1))
    assert kind_of(
        lambda x: tf.reduce_mean(layer(x[:, :, None], x[:, :, None]))).name == "mean"


@pytest.mark.parametrize("make", [
    lambda: Centered(), lambda: L.Lambda(lambda x: x - tf.reduce_mean(x, axis=0)),
], ids=["layer", "lambda"])
def test_what_a_users_layer_does_is_one(make):
    kind = kind_of(lambda x: tf.reduce_mean(make()(x) ** 2))
    assert kind.name == "other" and "made of all rows" in kind.fault.what


def test_noise_is_no_fault():
    assert kind_of(lambda x: tf.reduce_mean(x * tf.random.uniform(tf.shape(x)))).name == "mean"
    assert kind_of(lambda x: tf.reduce_mean(x * tf.random.normal([]))).name == "mean"
    assert kind_of(lambda x: tf.reduce_mean(tf.nn.dropout(x, 0.5))).name == "mean"
