"""The rate of Dropout layers, set after a model is built."""

import keras
import numpy as np
import pytest

from towers.app import models
from towers.machine import devices
from towers.machine.keras_internals import all_layers
from towers.app.models.dropout import set_dropout
from towers.step import TowerStep

pytestmark = pytest.mark.light  # not about updates or curves

L = keras.layers


def model_of(*layers, shape=(1000,)):
    return keras.Sequential([keras.Input(shape), *layers])


def dropped(model, shape=(4, 1000)):
    """The share of zeros in the output for ones, in training."""
    return float((np.asarray(model(np.ones(shape, np.float32), training=True)) == 0).mean())


@pytest.mark.parametrize("rate", [0.25, 0.5])
@pytest.mark.parametrize("built_with", [0.0, 0.1])
def test_the_rate_is_the_share_of_dropped_units(built_with, rate):
    model = model_of(L.Dropout(built_with, seed=1))
    set_dropout(model, rate)
    assert dropped(model) == pytest.approx(rate, abs=0.04)  # 5.8 standard deviations of 4,000 units


def test_zero_drops_nothing():
    model = model_of(L.Dropout(0.5), L.AlphaDropout(0.5), L.GaussianDropout(0.5))
    set_dropout(model, 0)
    np.testing.assert_array_equal(model(np.ones((2, 1000)), training=True), np.ones((2, 1000)))


def test_layers_of_nested_models_and_wrappers_are_set():
    inner = model_of(L.Dropout(0.1), L.SpatialDropout1D(0.1), shape=(5, 4))
    model = keras.Sequential([
        keras.Input((5, 4)), inner, L.TimeDistributed(L.Dropout(0.1)), L.Bidirectional(L.GRU(3))
    ])
    set_dropout(model, 0.4)
    rates = [layer.rate for layer in all_layers(model) if hasattr(layer, "rate")]
    assert rates == [0.4] * 3


def test_recurrent_dropout_is_set_where_there_is_some():
    gru = L.GRU(3, dropout=0.1, return_sequences=True)
    lstm = L.LSTM(3, recurrent_dropout=0.1, return_sequences=True)
    plain = L.GRU(3)
    set_dropout(model_of(gru, lstm, plain, shape=(5, 4)), 0.3)
    assert (gru.dropout, gru.recurrent_dropout) == (0.3, 0)
    assert (lstm.dropout, lstm.recurrent_dropout) == (0, 0.3)
    assert (plain.dropout, plain.recurrent_dropout) == (0, 0)


def attention_model(dropout):
    x = keras.Input((5, 4))
    return keras.Model(x, L.MultiHeadAttention(2, 3, dropout=dropout)(x, x))


def test_attention_without_dropout_has_no_layer_to_set():
    with pytest.raises(ValueError, match="has no Dropout layer"):
        set_dropout(attention_model(0.0), 0.5)
    set_dropout(attention_model(0.1), 0.5)


@pytest.mark.parametrize("model, rate", [("mlp", 0.5), ("mlp", 0), ("resnet20", 0.1)])
def test_a_model_without_dropout_is_refused(model, rate):
    model = models.load(model).build((12, 12, 1), 10)
    with pytest.raises(ValueError) as caught:
        set_dropout(model, rate)
    assert f"dropout ({rate}) has no effect: model {model.name!r} has no" in str(caught.value)


@pytest.mark.parametrize("rate", [-0.1, 1, float("nan")])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match="from 0 to below 1"):
        set_dropout(model_of(L.Dropout(0.5)), rate)


@pytest.mark.parametrize("name, count", [("cnn", 2), ("notebook_cnn", 2), ("gru", 3), ("lstm", 3)])
def test_built_in_models_have_layers_to_set(name, count):
    model = models.load(name).build((12, 12, 1), 10)
    set_dropout(model, 0)
    rates = [layer.rate for layer in model.layers if isinstance(layer, L.Dropout)]
    assert rates == [0] * count


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


@pytest.mark.parametrize("built_with, rate", [(0.0, 0.5), (0.5, 0.0), (0.5, 0.25)])
def test_a_saved_model_keeps_the_rate(built_with, rate, tmp_path):
    model = model_of(L.Dropout(built_with), L.Dense(2), shape=(4,))
    set_dropout(model, rate)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].rate == rate
    np.testing.assert_array_equal(loaded(np.ones((1, 4))), model(np.ones((1, 4))))
