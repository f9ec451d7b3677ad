"""The gradient noise scale: where it is known, on every kind of gradient, and without an effect."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.machine.devices import GPU, tower_devices
from towers.step.noise_scale import NoiseMetric, squared_norm

L = keras.layers
WIDTH, DISTANCE, SIGMA = 10, 0.5, 1.0


def regression(num_towers=8, **options):
    """A linear model at a distance of DISTANCE in each weight from the data's, at rest."""
    model = keras.Sequential([keras.Input((WIDTH,)), L.Dense(1, use_bias=False)])
    model.set_weights([np.full((WIDTH, 1), DISTANCE)])
    return towers.TowerStep(
        model, keras.optimizers.SGD(0.0), "mse", devices=tower_devices(2, "cpu"),
        num_towers=num_towers, noise_scale=True, **options,
    )


def batch(rng, size):
    x = rng.normal(size=(size, WIDTH))
    return x, SIGMA * rng.normal(size=(size, 1))


def test_it_is_that_of_a_regression_with_a_known_covariance(float64):
    """An example's gradient is 2 x (x.d - e): |G|^2 = 4|d|^2, tr(S) = 4(|d|^2 (W + 1) + W s^2)."""
    step, rng = regression(), np.random.default_rng(1)
    for _ in range(150):
        logs = step(*batch(rng, 61))  # shards of 7 and 8
    square = WIDTH * DISTANCE**2
    expected = (square * (WIDTH + 1) + WIDTH * SIGMA**2) / square
    assert float(logs["noise_scale"]) == pytest.approx(expected, rel=0.1)
    step.reset_metrics()
    assert np.isnan(float(step.noise.result()))
    with pytest.raises(ValueError, match="noise_scale needs two towers"):
        regression(num_towers=1)


def test_one_tower_one_example_and_gradients_that_are_not_finite_tell_nothing():
    metric = NoiseMetric()
    metric.update_state([1.0, 0.0], [5, 0], 1.0)
    metric.update_state([1.0, np.nan], [5, 5], 1.0)
    assert np.isnan(float(metric.result()))
    metric.update_state([1.0, 1.0], [1, 1], 0.5)  # opposite to each other, but for little
    assert float(metric.result()) == np.inf


def test_by_hand():
    """g = 1, 3 of shards of 2 and 6 examples, weighed by 1/4 and 3/4: b = 2.5^2, a = 1/4 + 27/4."""
    metric = NoiseMetric()
    metric.update_state([1 / 16, 81 / 16], [2, 6], 6.25)
    assert float(metric.result()) == pytest.approx((7 - 6.25) * 8 / (2 * 6.25 - 7))


def test_the_norm_adds_slices_of_one_row_first():
    slices = tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([4, 0, 4]), [9, 1])
    half = tf.constant([2.0], tf.float16)
    assert float(squared_norm([slices, None, half])) == 4**2 + 2**2 + 2**2


@pytest.mark.filterwarnings("ignore:.*XLA runs towers on")
@pytest.mark.parametrize("options", [
    {}, {"strategy": "mirrored", "policy": GPU}, {"nonfinite": "skip"}, {"jit_compile": True},
], ids=["plain", "mirrored", "skip", "xla"])
def test_the_weights_have_the_same_bits_as_without_it(options):
    def trained(**more):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([
            keras.Input((5,), dtype="int32"), L.Embedding(9, 4), L.Flatten(), L.Dropout(0.2),
            L.Dense(7, activation="relu"), L.Dense(3),
        ])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        step = towers.TowerStep(model, keras.optimizers.Adam(0.05, clipnorm=0.1), loss,
                                num_towers=3, devices=tower_devices(3, "cpu"), **options, **more)
        rng = np.random.default_rng(0)
        for _ in range(4):
            logs = step(rng.integers(0, 9, (11, 5)), rng.integers(0, 3, 11))
        return model.get_weights(), logs

    (plain, logs), (measured, more) = trained(), trained(noise_scale=True)
    assert [w.tobytes() for w in plain] == [w.tobytes() for w in measured]
    assert float(more.pop("noise_scale")) > 0 and set(more) == set(logs)
