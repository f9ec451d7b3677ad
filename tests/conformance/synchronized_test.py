"""Synchronized BatchNormalization in Keras' fit: the large batch's, on any number of devices."""

import keras
import numpy as np
import pytest

import towers
from tests.parallel.pairs import assert_same_logs

L = keras.layers


class Own(keras.Sequential):
    """A step of the model's own."""

    def train_step(self, data):
        return super().train_step(data)


def trained(num_towers=None, num_devices=1, kind=keras.Sequential, **batch_norm):
    keras.utils.set_random_seed(5)
    norm = L.BatchNormalization(synchronized=not batch_norm)
    layers = [keras.Input((6, 6, 1)), L.Conv2D(3, 3), norm, L.ReLU(), L.Flatten(), L.Dense(3)]
    model = kind(layers)
    if num_towers:
        model = towers.make_parallel(model, num_devices, num_towers=num_towers, **batch_norm)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 6, 6, 1)), rng.integers(0, 3, 22)
    history = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0,
                        validation_data=(x[:9], y[:9])).history
    return model, history


@pytest.mark.telling("3-all", "3-own")
@pytest.mark.parametrize(
    "options", [{}, {"batch_norm": "synchronized"}, {"kind": Own}], ids=["layer", "all", "own"])
@pytest.mark.parametrize("num_towers", [3, 8])
def test_it_is_the_large_batchs(num_towers, options, float64):
    theirs, expected = trained()
    ours, history = trained(num_towers, 2, **options)
    assert_same_logs(history, expected)
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.matrix
def test_it_has_the_same_bits_on_any_number_of_devices():
    first, *others = [trained(8, n, batch_norm="synchronized")[0] for n in (1, 2, 8)]
    for other in others:
        for a, b in zip(first.variables, other.variables, strict=True):
            assert a.numpy().tobytes() == b.numpy().tobytes(), a.path


def normalizing(trainable=True, **options):
    norm = L.BatchNormalization(name="norm", **options)
    norm.trainable = trainable
    return keras.Sequential([keras.Input((4,)), L.Dense(3), norm, L.Dense(1)])


class Normalizes(keras.Model):
    """A subclassed model; `training` is passed on, or is False whatever `fit` says."""

    def __init__(self, is_fixed=False):
        super().__init__()
        self.norm, self.dense = L.BatchNormalization(name="norm"), L.Dense(1)
        self.is_fixed = is_fixed

    def call(self, x, training=None):
        return self.dense(self.norm(x, training=False if self.is_fixed else training))


class CustomStep(Normalizes):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("make, given, is_told", [
    (normalizing, {}, True),
    (Normalizes, {}, True),
    (CustomStep, {}, True),
    (normalizing, {"num_towers": 1}, False),
    (normalizing, {"batch_norm": "average"}, False),
    (normalizing, {"batch_norm": "tower0"}, False),
    (normalizing, {"batch_norm": "synchronized"}, False),
    (lambda: normalizing(synchronized=True), {}, False),
    (lambda: normalizing(trainable=False), {}, False),
    (lambda: Normalizes(is_fixed=True), {}, False),
    (lambda: CustomStep(is_fixed=True), {}, False),
])
def test_statistics_that_are_averaged_by_default_are_told_once_by_the_first_step(
    make, given, is_told, recwarn
):
    parallel = towers.make_parallel(make(), 2, **given)
    parallel.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((4, 4), "float32"), np.ones((4, 1), "float32")
    if make is normalizing:
        parallel.evaluate(x, y, verbose=0)
        assert not len(recwarn)
    parallel.train_on_batch(x, y)
    said = [str(w.message) for w in recwarn if "BatchNormalization" in str(w.message)]
    assert len(said) == is_told
    assert all("norm" in text and 'Pass batch_norm="synchronized"' in text for text in said)
    assert len(recwarn) == is_told
