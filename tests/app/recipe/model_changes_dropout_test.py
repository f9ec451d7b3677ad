"""The rate of Dropout layers, set after a model is built."""

import keras
import numpy as np
import pytest

from towers.app import models
from towers.app.recipe.model_changes import set_dropout
from towers.machine import devices
from towers.machine.keras_internals import all_layers
from towers.step import TowerStep

L = keras.layers


def model_of(*layers, shape=(1000,)):
    return keras.Sequential([keras.Input(shape), *layers])


def attention_model(dropout):
    x = keras.Input((5, 4))
    return keras.Model(x, L.MultiHeadAttention(2, 3, dropout=dropout)(x, x))


@pytest.mark.parametrize("rate", [0, 0.25])
@pytest.mark.parametrize("built_with", [0.0, 0.1])
def test_the_rate_is_the_share_of_dropped_units_also_in_a_saved_model(built_with, rate, tmp_path):
    model = model_of(L.Dropout(built_with, seed=1))
    set_dropout(model, rate)
    dropped = np.asarray(model(np.ones((4, 1000), np.float32), training=True)) == 0
    assert dropped.mean() == pytest.approx(rate, abs=0.04)  # 5.8 standard deviations of 4,000 units
    model.save(tmp_path / "model.keras")
    assert keras.models.load_model(tmp_path / "model.keras").layers[0].rate == rate


def test_every_layer_that_drops_is_set_and_no_other():
    gru = L.GRU(3, dropout=0.1, return_sequences=True)
    lstm = L.LSTM(3, recurrent_dropout=0.1, return_sequences=True)
    inner = model_of(L.Dropout(0.1), L.SpatialDropout1D(0.1), shape=(5, 4))
    model = model_of(
        inner, L.TimeDistributed(L.Dropout(0.1)), L.AlphaDropout(0.1), L.GaussianDropout(0.1),
        gru, lstm, L.Bidirectional(L.GRU(3)), shape=(5, 4),
    )
    set_dropout(model, 0.4)
    assert [layer.rate for layer in all_layers(model) if hasattr(layer, "rate")] == [0.4] * 5
    assert (gru.dropout, gru.recurrent_dropout) == (0.4, 0)
    assert (lstm.dropout, lstm.recurrent_dropout) == (0, 0.4)
    set_dropout(attention_model(0.1), 0.5)


@pytest.mark.parametrize("build", [
    lambda: models.load("mlp").build((12, 12, 1), 10), lambda: attention_model(0.0),
])
def test_a_model_that_drops_nothing_is_refused(build):
    model = build()
    with pytest.raises(ValueError) as caught:
        set_dropout(model, 0.5)
    assert f"dropout (0.5) has no effect: model {model.name!r} has no" in str(caught.value)


def test_a_layer_built_with_rate_0_gets_a_seed_that_towers_advance_and_know_as_one():
    def train(num_devices):
        keras.utils.set_random_seed(0)
        model = model_of(L.Dense(6), L.Dropout(0.0), L.Dense(1), shape=(4,))
        assert not model.non_trainable_variables
        set_dropout(model, 0.5)
        (seed,) = model.non_trainable_variables
        before = seed.numpy()
        step = TowerStep(
            model, "sgd", "mse", num_towers=3, devices=devices.tower_devices(num_devices, "cpu")
        )
        rng = np.random.default_rng(0)
        for _ in range(2):
            step(rng.normal(size=(6, 4)), rng.normal(size=(6, 1)))
        assert not np.array_equal(seed.numpy(), before)
        return [v.numpy().tobytes() for v in model.variables]

    assert train(1) == train(3)
