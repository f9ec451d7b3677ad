"""batch_norm="average" and "tower0", divided: each tower normalizes with its own statistics."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.parallel.pairs import assert_close

L = keras.layers
TOWERS = 3
ROWS = (11, 2)  # shards of 4, 4 and 3 rows; of 1, 1 and no row
RATE = 0.1


@pytest.fixture(autouse=True)
def exact(float64):
    """Compares in float64."""


def data(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, 5, 6))
    x[:, 3:] *= rng.integers(0, 2, (n, 2, 1))  # steps of zeros, which `Masking` leaves out
    return x, rng.normal(size=(n, 3))


def convolutions():
    x = keras.Input((5, 6))
    hidden = L.Activation("relu")(L.BatchNormalization()(L.Conv1D(4, 3)(x)))
    hidden = L.BatchNormalization(scale=False, momentum=0.7)(L.Dense(4)(L.Flatten()(hidden)))
    return keras.Model(x, L.Dense(3)(hidden))


def masked():
    x = keras.Input((5, 6))
    normalized = L.BatchNormalization()(L.Masking()(x))
    return keras.Model(x, L.Dense(3)(L.GlobalAveragePooling1D()(normalized)))


def shared():
    x = keras.Input((5, 6))
    layer, frozen = L.BatchNormalization(center=False), L.BatchNormalization(trainable=False)
    hidden = layer(L.Dense(6)(layer(L.Dense(6, "tanh")(x))))
    return keras.Model(x, L.Dense(3)(frozen(L.Flatten()(hidden))))


MODELS = {"convolutions": convolutions, "masked": masked, "shared": shared}


def made(build):
    keras.utils.set_random_seed(5)
    model = build()
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def shards(n):
    """Returns the slices of the towers' rows; a tower without rows has none."""
    ends = np.cumsum([n // TOWERS + (t < n % TOWERS) for t in range(TOWERS)])
    return [slice(start, end) for start, end in zip([0, *ends], ends) if end > start]


def by_hand(model, mode):
    """Trains a plain model on each shard by itself; returns the values of its variables."""
    for n in ROWS:
        x, y = map(tf.constant, data(n))
        before = [variable.numpy() for variable in model.non_trainable_variables]
        statistics, gradients, weights = [], [], []
        for shard in shards(n):
            for variable, value in zip(model.non_trainable_variables, before, strict=True):
                variable.assign(value)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x[shard], training=True) - y[shard]))
            gradients.append(tape.gradient(loss, model.trainable_variables))
            statistics.append([variable.numpy() for variable in model.non_trainable_variables])
            weights.append((shard.stop - shard.start) / n)
        kept = np.eye(len(weights))[0] if mode == "tower0" else weights
        for variable, values in zip(model.non_trainable_variables, zip(*statistics), strict=True):
            variable.assign(np.tensordot(kept, values, 1))
        for variable, values in zip(model.trainable_variables, zip(*gradients), strict=True):
            variable.assign_sub(RATE * np.tensordot(weights, values, 1))
    return [variable.numpy() for variable in model.variables]


@pytest.mark.telling("convolutions-average", "shared-average", "masked-tower0")
@pytest.mark.parametrize("mode", ["average", "tower0"])
@pytest.mark.parametrize("name", MODELS)
def test_towers_normalize_their_own_rows(name, mode):
    build = MODELS[name]
    model = towers.make_parallel(made(build), TOWERS, num_towers=TOWERS, batch_norm=mode)
    for n in ROWS:
        model.train_on_batch(*data(n))
    assert_close(model.variables, by_hand(made(build), mode), 1e-12, 1e-12)
