"""A model's own train_step on towers ends where plain Keras does, for every shard split."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.bits import bits
from tests.conformance.gans import GAN
from tests.conformance.custom_step_cases import OWN
from tests.conformance.steps import fit_alike

L = keras.layers
# A warning would say that something of these models that takes time runs once.
pytestmark = pytest.mark.filterwarnings("error::towers.machine.user_lines.TowersWarning")

# Global batches of 22 rows: with a ragged last batch; and with fewer rows than towers.
BATCHES = {1: 16, 2: 16, 3: 16, 5: 4, 8: 4}


@pytest.mark.telling("gan-3", "maml-3")
@pytest.mark.parametrize("num_towers", BATCHES)
@pytest.mark.parametrize("case", OWN, ids=str)
def test_custom_steps_train_as_keras_does(case, num_towers, float64):
    data = case.data(22, np.random.default_rng(22))
    batch_size = BATCHES[num_towers]
    fit_alike(case.make, *data, num_towers=num_towers, batch_size=batch_size, epochs=2)


class Noisy(GAN):
    """Draws its noise; dropout, BatchNormalization, means that are asked for in between."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((3,)),
                L.Dense(6),
                L.BatchNormalization(),
                L.Dropout(0.3, seed=1),
                L.Dense(4),
            ]
        )
        self.seed = keras.random.SeedGenerator(7)

    def train_step(self, data):
        noise = keras.random.normal([tf.shape(data)[0], 3], seed=self.seed)
        logs = super().train_step((data, noise))
        self.means[0].update_state(logs["d_loss"])
        return {**logs, "again": self.means[0].result()}


class DrawsByTensorFlow(Noisy):
    """tf.random draws by seeds that stand in the graph."""

    def train_step(self, data):
        return super().train_step(data + tf.random.normal(tf.shape(data), stddev=0.1, seed=3))


def noisy_rows(count=45):
    return np.random.default_rng(1).normal(size=(count, 4)).astype("float32")


def trained_bits(cls, num_towers=None, num_devices=1, default_device="/cpu:0"):
    """All variables and logs after 2 epochs; by Keras where no towers are asked for."""
    keras.utils.set_random_seed(5)
    with tf.device("/cpu:0"):
        model = cls()
    with tf.device(default_device):
        if num_towers is not None:
            model = towers.make_parallel(model, num_devices, num_towers=num_towers)
        model.compile(jit_compile=False)
        history = model.fit(noisy_rows(), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["d_loss"]).all()
    variables = [*model.variables, *model.d_optimizer.variables, *model.g_optimizer.variables]
    return [bits(v) for v in variables], history


@pytest.mark.telling("DrawsByTensorFlow-3-*")
@pytest.mark.parametrize(
    "cls, num_towers, devices",
    [
        (Noisy, 8, (1, 2, 4, 8)),
        (DrawsByTensorFlow, 8, (8,)),
        (DrawsByTensorFlow, 3, (3,)),
    ],
)
def test_a_number_of_towers_gives_the_same_bits_on_any_devices(cls, num_towers, devices):
    """On any number of them, wherever the optimizers are made: see default_device_test."""
    first, *others = [trained_bits(cls, num_towers, num_devices) for num_devices in devices]
    for other in [*others, trained_bits(cls, num_towers, 2, default_device="/cpu:3")]:
        assert other == first


def test_one_tower_is_keras_bit_for_bit():
    assert trained_bits(Noisy, 1) == trained_bits(Noisy)
