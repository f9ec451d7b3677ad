"""What layers assign in their call is what Keras would have assigned, for any split into towers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.cases import rows
from tests.conformance.steps import fit_alike
from tests.parallel.pairs import assert_close, assert_same_logs

L, ops = keras.layers, keras.ops


class Keeps(L.Layer):
    """Keeps what Keras does not list, and metrics; state_test has the kinds of weights."""

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
        self.decay = self.add_weight(shape=(), initializer="zeros", trainable=False, name="decay")

    def call(self, x):
        self.calls.assign_add(0.1)
        self.decay.assign(0.5 * self.decay + 0.1 * ops.sum(self.codebook))
        self.loss_tracker.update_state(ops.mean(x**2))
        self.row_tracker.update_state(ops.sum(x, axis=1))
        noise = keras.random.normal(ops.shape(x), seed=self.hidden())
        scale = tf.gather(self.codebook, [1]) * self.decay + self.calls
        return x * self.codebook * scale + 0.0 * noise


def keeps():
    """A model of these layers, 6 numbers -> 3."""
    return keras.Sequential(
        [keras.Input((6,)), L.SpectralNormalization(L.Dense(5)), Keeps(), L.Dense(3)]
    )


def compiled():
    model = keeps()
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model


@pytest.mark.telling("3")
@pytest.mark.parametrize("num_towers", [3, 8])  # with ragged, and with empty shards
def test_what_layers_assign_is_what_keras_assigns(num_towers, float64):
    x, y, _ = rows(23, np.random.default_rng(0))
    models = fit_alike(compiled, x, y, num_towers=num_towers, batch_size=8, epochs=2)
    theirs, ours = (m.evaluate(x, y, batch_size=8, verbose=0, return_dict=True) for m in models)
    assert set(theirs) == {"loss", "endpoint", "by_row"}
    assert_same_logs(ours, theirs)
    theirs, ours = ([m.layers[1].calls, m.layers[1].hidden().state] for m in models)
    assert_close(ours, theirs)
