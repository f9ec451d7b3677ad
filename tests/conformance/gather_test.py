"""towers.gather in what Keras' own steps call: loss functions, compute_loss, layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import fit_alike

L = keras.layers
ops = keras.ops


def contrast(labels, embeddings):
    """InfoNCE over the batch: rows of the same label are to be alike."""
    rows = tf.math.l2_normalize(towers.gather(embeddings), axis=1)
    labels = towers.gather(labels)
    similar = tf.matmul(rows, rows, transpose_b=True) / 0.3 - 9.0 * tf.eye(
        tf.shape(rows)[0], dtype=rows.dtype)
    same = tf.cast(labels[:, tf.newaxis] == labels[tf.newaxis], rows.dtype)
    same = same - tf.eye(tf.shape(rows)[0], dtype=rows.dtype)
    likely = tf.nn.log_softmax(similar, axis=1)
    return -tf.reduce_sum(same * likely) / (tf.reduce_sum(same) + 1.0)


def in_a_loss():
    model = keras.Sequential([keras.Input((4,)), L.Dense(6, activation="tanh"), L.Dense(3)])
    return model, {"loss": contrast}


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return contrast(y, y_pred) + 0.1 * ops.mean(y_pred ** 2)


def in_compute_loss():
    return OwnLoss([keras.Input((4,)), L.Dense(6, activation="tanh"), L.Dense(3)]), {}


@keras.saving.register_keras_serializable("tests")
class Centered(L.Layer):
    """Each row less the mean over the whole batch."""

    def call(self, x):
        return x - ops.mean(towers.gather(x), axis=0)


def in_a_layer():
    layers = [keras.Input((4,)), L.Dense(6, activation="tanh"), Centered(), L.Dense(3)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.Sequential(layers), {"loss": loss, "metrics": ["accuracy"]}


@pytest.mark.telling("*-3")
@pytest.mark.parametrize("num_towers", [1, 3, 8])
@pytest.mark.parametrize("make", [in_a_loss, in_compute_loss, in_a_layer])
def test_gather_makes_it_the_large_batchs(make, num_towers, float64):
    def compiled():
        model, options = make()
        model.compile("adam", jit_compile=False, **options)
        return model

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 4)), rng.integers(0, 3, 22)
    theirs, ours = fit_alike(compiled, x, y, num_towers=num_towers, batch_size=6, epochs=2,
                             validation_data=(x[:9], y[:9]))
    np.testing.assert_allclose(
        ours.predict(x, batch_size=6, verbose=0), theirs.predict(x, batch_size=6, verbose=0),
        rtol=1e-9)


def test_without_gather_each_tower_compares_its_own_rows():
    """Otherwise the test above could not fail."""
    rows, labels = tf.random.stateless_normal([6, 3], [1, 2]), tf.constant([0, 1, 2, 0, 1, 2])
    halves = [contrast(labels[half], rows[half]) for half in (slice(3), slice(3, 6))]
    assert abs(float(contrast(labels, rows)) - float(sum(halves)) / 2) > 0.1
