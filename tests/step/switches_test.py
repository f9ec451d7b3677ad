"""Packed transfers and XLA change how a step is computed, never what."""

import dataclasses

import keras
import numpy as np
import pytest

import towers
from tests.conformance.cases import noisy
from tests.step.small_step import batch, make_step
from towers.machine.policy import CPU

L = keras.layers
PACKED = dataclasses.replace(CPU, pack_transfers=True)


@pytest.mark.parametrize("options", [
    {"policy": PACKED}, pytest.param({"jit_compile": True}, marks=pytest.mark.matrix),
], ids=str)
def test_packed_and_compiled_towers_give_the_same_bits_on_any_number_of_devices(options):
    """Packed transfers have the bits of unpacked ones; XLA's are its own."""
    def train(step):
        logs = [step.train_batch(*batch(count)) for count in (40, 40, 7, 3)]
        values = [v.numpy() for v in [*step.model.variables, *step.optimizer.variables]]
        return [*map(float, logs[-1].values()), *values]

    on_one = {} if "policy" in options else options
    for a, b in zip(train(make_step(3, **options)), train(make_step(1, **on_one)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("count", [40, 3])
def test_compiled_towers_give_the_large_batch_gradient(count, float64):
    """Without dropout, whose random numbers XLA draws by another generator."""
    x, y = batch(count)
    found = []
    for num_towers in (4, 1):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([
            keras.Input((6,)), L.Dense(8, activation="tanh", kernel_regularizer="l2"),
            L.Dense(3, activation="softmax"),
        ])
        step = towers.TowerStep(
            model, "sgd", "sparse_categorical_crossentropy", devices=["/cpu:0"],
            num_towers=num_towers, jit_compile=num_towers > 1,
        )
        loss, gradients = step.gradients(x.astype("float64"), y)
        found.append([loss, *gradients])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


def test_a_layer_that_xla_cannot_compile_is_named():
    """As GRU and LSTM are where a GPU's cuDNN computes them."""
    model = keras.Sequential([keras.Input((8, 8, 3)), L.RandomRotation(0.1, name="turned")])
    with pytest.raises(ValueError, match="XLA cannot compile layer 'turned', a RandomRotation"):
        towers.TowerStep(model, "sgd", "mse", devices=["/cpu:0"], jit_compile=True)


def test_xla_does_not_compile_noise_that_it_would_draw_without_a_seed(recwarn):
    x, y = np.zeros((4, 6), "float32"), np.zeros((4, 3), "float32")
    found = []
    for jit_compile in (True, False):
        keras.utils.set_random_seed(0)
        step = towers.TowerStep(
            noisy("in_branch"), "sgd", "mse", devices=["/cpu:0"], jit_compile=jit_compile
        )
        found.append([step(x, y)["loss"], step(x, y)["loss"]])
    assert found[0] == found[1]
    (told,) = [str(w.message) for w in recwarn if "XLA does not compile" in str(w.message)]
    assert "tf.random, whose seeds" in told
