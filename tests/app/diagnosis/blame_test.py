"""The layer that is named where the averaged gradient is not the large batch's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.app.diagnosis.verify import verify_gradients
from towers.step.compiled import losses
from towers.step import TowerStep

L = keras.layers


class Centred(L.Layer):
    def call(self, x):
        return x - tf.reduce_mean(x, axis=0)


class AddsARoot(L.Layer):
    def call(self, x):
        self.add_loss(tf.sqrt(tf.reduce_mean(tf.square(x))))
        return x


class RootLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.sqrt(tf.reduce_mean(tf.square(y - y_pred)))


def compiled(*layers, loss="mse", kind=keras.Sequential):
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        model = kind([keras.Input((3,)), L.Dense(4), *layers, L.Dense(1)])
    model.compile("sgd", loss)
    return model


def centring():
    return compiled(Centred(name="centred"))


def data():
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    split = x, x.sum(axis=1, keepdims=True) + 20
    return split, split


def verified(model, num_towers=3):
    loss, loss_weights = losses(model)
    step = TowerStep(
        model, "sgd", loss, loss_weights=loss_weights, devices=["/cpu:0"], num_towers=num_towers
    )
    return verify_gradients(step, loss, *data()[0], loss_weights=loss_weights)


@pytest.mark.parametrize(("model", "words"), [
    (centring, ["layer 'centred' computes across", "gather"]),
    (lambda: compiled(keras.Sequential([L.Dense(4), Centred(name="in")])), ["layer 'in' comp"]),
    (lambda: compiled(L.Dropout(0.5), Centred(name="centred")), ["layer 'centred' computes"]),
    (lambda: compiled(L.UnitNormalization(axis=0, name="unit")), ["layer 'unit' computes"]),
    (lambda: compiled(AddsARoot(name="adds")), ["the loss that layer 'adds' adds", "gather"]),
    (lambda: compiled(kind=RootLoss), ["RootLoss.compute_loss may be no mean", "gather"]),
])
def test_what_makes_the_gradients_differ_is_named_with_the_way_out(model, words):
    model = model()
    before = [v.numpy().copy() for v in model.variables]
    error = verified(model).error
    assert all(word in error for word in words), error
    assert "num_towers=1" in error and "verify_gradients=warn" in error
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


@pytest.mark.parametrize("layer", [lambda: L.Dropout(0.5), L.BatchNormalization, L.ReLU])
def test_noise_statistics_and_rounding_are_no_errors(layer):
    assert verified(compiled(layer())).error is None


def test_one_tower_has_nothing_to_blame():
    assert verified(compiled(loss=keras.losses.Dice()), num_towers=1).error is None
