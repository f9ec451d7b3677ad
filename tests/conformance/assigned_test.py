"""What layers assign in their call is what Keras would have assigned, for any split into towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers

L, ops = keras.layers, keras.ops


class Keeps(L.Layer):
    """Keeps all that towers can carry; what Keras does not list, too."""

    def __init__(self):
        super().__init__(name="keeps")
        self.loss_tracker = keras.metrics.Mean(name="endpoint")
        self.row_tracker = keras.metrics.Mean(name="by_row")
        generator = keras.random.SeedGenerator(3)
        self.hidden = lambda: generator
        self.calls = tf.Variable(0.0, dtype=keras.config.floatx(), name="calls")
        self.codebook = tf.Variable(
            np.arange(1.0, 6.0) / 10, dtype=keras.config.floatx(), name="codebook"
        )

    def build(self, shape):
        def state(name, shape, aggregation="none", dtype=None):
            return self.add_weight(
                shape=shape,
                initializer="zeros",
                trainable=False,
                name=name,
                dtype=dtype,
                aggregation=aggregation,
            )

        self.steps = state("steps", (), dtype="int32")
        self.rows = state("rows", (), "sum", "int32")
        self.total = state("total", (shape[-1],), "sum")
        self.mean = state("mean", (shape[-1],), "mean")
        self.decay = state("decay", ())

    def call(self, x):
        self.steps.assign_add(1)
        self.calls.assign_add(0.1)
        self.decay.assign(0.5 * self.decay + 0.1 * ops.sum(self.codebook))
        self.rows.assign_add(ops.shape(x)[0])
        self.total.assign_add(ops.sum(x, axis=0))
        self.total.assign_sub(ops.mean(x, axis=0))
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        self.loss_tracker.update_state(ops.mean(x**2))
        self.row_tracker.update_state(ops.sum(x, axis=1))
        noise = keras.random.normal(ops.shape(x), seed=self.hidden())
        scale = tf.gather(self.codebook, [1]) * self.decay + self.calls
        return x * self.codebook * scale + 0.0 * noise


def data(count=23):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 4)), rng.normal(size=(count, 2))


def trained(make, num_towers=None, epochs=2):
    """(history, evaluation, all variables, hidden ones too); by Keras without a tower count."""
    model, history = fitted(make, num_towers, epochs)
    evaluated = model.evaluate(*data(), batch_size=8, verbose=0, return_dict=True)
    keeps = [layer for layer in model.layers if isinstance(layer, Keeps)]
    hidden = [v for layer in keeps for v in (layer.calls, layer.hidden().state)]
    return history, evaluated, [v.numpy() for v in [*model.variables, *hidden]]


def fitted(make, num_towers=None, epochs=1):
    """(model, history)"""
    keras.utils.set_random_seed(1)
    layers = [L.Dense(5, activation="tanh"), *make(), L.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    if num_towers is not None:
        model = towers.make_parallel(model, 2, num_towers=num_towers)
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    model.run_eagerly = num_towers is None  # sooner than traced, to the same values
    return model, model.fit(*data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0).history


def all_that_is_kept():
    return L.SpectralNormalization(L.Dense(5)), Keeps()


def keeps():
    """A model of these layers, 6 numbers -> 3."""
    return keras.Sequential([keras.Input((6,)), *all_that_is_kept(), L.Dense(3)])


@pytest.mark.telling("3")
@pytest.mark.parametrize("num_towers", [3, 8])  # with ragged, and with empty shards
def test_what_layers_assign_is_what_keras_assigns(num_towers, float64):
    (theirs, evaluated, expected), ours = (
        trained(all_that_is_kept),
        trained(all_that_is_kept, num_towers),
    )
    assert set(theirs) == {"loss", "endpoint", "by_row"}
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[0][name], values, rtol=1e-10, err_msg=name)
        np.testing.assert_allclose(ours[1][name], evaluated[name], rtol=1e-10, err_msg=name)
    for a, b in zip(ours[2], expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
