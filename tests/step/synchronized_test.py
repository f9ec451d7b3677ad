"""BatchNormalization over all towers: the large batch's output, statistics and gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.machine import devices
from towers.step import TowerStep

L = keras.layers


def build(**options):
    keras.utils.set_random_seed(1)
    return keras.Sequential([
        keras.Input((6, 6, 2)), L.Conv2D(4, 3), L.BatchNormalization(**options),
        L.Activation("relu"), L.Flatten(), L.Dense(5), L.BatchNormalization(**options), L.Dense(3),
    ])


def masked():
    keras.utils.set_random_seed(1)
    x = keras.Input((7, 4))
    return keras.Model(x, L.Dense(3)(L.BatchNormalization()(L.Masking()(x))))


def batch(size):
    rng = np.random.default_rng(size)
    return rng.normal(3.0, 2.0, (size, 6, 6, 2)), rng.normal(size=(size, 3))


def masked_batch(size):
    rng = np.random.default_rng(size)
    x = rng.normal(size=(size, 7, 4))
    x[np.arange(7)[None, :] >= rng.integers(1, 8, size)[:, None]] = 0
    return x, rng.normal(size=(size, 7, 3))


def make_step(model, num_towers, num_devices=None, **options):
    names = devices.tower_devices(num_devices or num_towers, "cpu")
    return TowerStep(model, keras.optimizers.SGD(0.1), "mse", devices=names,
                     num_towers=num_towers, **options)


@pytest.mark.parametrize("size", [2, 7, 8, 9, 24])
@pytest.mark.parametrize("num_towers", [2, 3, 5, 8])
def test_gradient_and_statistics_are_the_large_batchs(num_towers, size, float64):
    towers, keras_alone = build(), build()
    keras_alone.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = batch(size)
    step = make_step(towers, num_towers, batch_norm="synchronized")
    with tf.GradientTape() as tape:
        loss = keras_alone.compute_loss(x, y, keras_alone(x, training=True))
    keras_alone.set_weights(towers.get_weights())
    ours_loss, ours = step.gradients(x, y)
    np.testing.assert_allclose(ours_loss, loss, rtol=1e-10)
    for a, b in zip(ours, tape.gradient(loss, keras_alone.trainable_variables), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * np.max(np.abs(b)) + 1e-14)
    step(x, y)
    keras_alone.train_on_batch(x, y)
    for a, b in zip(towers.variables, keras_alone.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=a.path)


def test_masked_steps_do_not_count(float64):
    towers, keras_alone = masked(), masked()
    keras_alone.compile(keras.optimizers.SGD(0.1), "mse")
    step = make_step(towers, 3, batch_norm="synchronized")
    for size in (9, 2):
        x, y = masked_batch(size)
        step(x, y)
        keras_alone.train_on_batch(x, y)
    for a, b in zip(towers.variables, keras_alone.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=a.path)


def test_a_layer_with_synchronized_true_is_honoured(float64):
    towers, keras_alone = build(synchronized=True), build()
    keras_alone.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = batch(9)
    make_step(towers, 4)(x, y)
    keras_alone.train_on_batch(x, y)
    for a, b in zip(towers.variables, keras_alone.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=a.path)


def test_averaged_statistics_differ_from_the_large_batchs(float64):
    """Otherwise the tests above could not fail."""
    towers, keras_alone = build(), build()
    keras_alone.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = batch(9)
    make_step(towers, 4)(x, y)
    keras_alone.train_on_batch(x, y)
    assert not np.allclose(towers.trainable_variables[0], keras_alone.trainable_variables[0])


def test_fewer_devices_than_towers_are_refused():
    with pytest.raises(ValueError, match="needs one device for each tower.*num_towers=2"):
        make_step(build(), 4, num_devices=2, batch_norm="synchronized")


def test_the_model_is_left_as_keras_made_it():
    model = build()
    make_step(model, 2, batch_norm="synchronized")(*batch(4))
    assert all("_moments" not in layer.__dict__ for layer in model.layers)
