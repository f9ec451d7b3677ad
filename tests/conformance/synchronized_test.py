"""Synchronized BatchNormalization in Keras' fit: the large batch's, on any number of devices."""

import keras
import numpy as np
import pytest

import towers
from tests.parallel.pairs import assert_same_logs

L = keras.layers


def trained(num_towers=None, num_devices=1, **batch_norm):
    keras.utils.set_random_seed(5)
    norm = L.BatchNormalization(synchronized=not batch_norm)
    layers = [keras.Input((6, 6, 1)), L.Conv2D(3, 3), norm, L.ReLU(), L.Flatten(), L.Dense(3)]
    model = keras.Sequential(layers)
    if num_towers:
        model = towers.make_parallel(model, num_devices, num_towers=num_towers, **batch_norm)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 6, 6, 1)), rng.integers(0, 3, 22)
    history = model.fit(
        x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, validation_data=(x[:9], y[:9])
    ).history
    return model, history


@pytest.mark.telling("3-all")
@pytest.mark.parametrize("batch_norm", [{}, {"batch_norm": "synchronized"}], ids=["layer", "all"])
@pytest.mark.parametrize("num_towers", [3, 8])
def test_it_is_the_large_batchs(num_towers, batch_norm, float64):
    theirs, expected = trained()
    ours, history = trained(num_towers, 2, **batch_norm)
    assert_same_logs(history, expected)
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9, atol=1e-10)


@pytest.mark.matrix
def test_it_has_the_same_bits_on_any_number_of_devices():
    first, *others = [trained(8, n, batch_norm="synchronized")[0] for n in (1, 2, 8)]
    for other in others:
        for a, b in zip(first.variables, other.variables, strict=True):
            assert a.numpy().tobytes() == b.numpy().tobytes(), a.path
