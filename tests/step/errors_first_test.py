"""A mistake in a batch is told as the tower that met it tells it, not as the others' cancelling."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.step.errors import first_error, values_explained

L = keras.layers
X, Y = np.ones((12, 4), np.float32), np.arange(12) % 3
WRONG = np.where(np.arange(12) == 7, 9, Y)  # of the second of three towers
OUT_OF_RANGE = "label value of 9 which is outside the valid range"
LOSS = "sparse_categorical_crossentropy"


def model(kind=keras.Sequential):
    keras.utils.set_random_seed(1)
    return kind([keras.Input((4,)), L.Dense(8), L.Dense(3, activation="softmax")])


def test_a_step_raises_the_error_of_its_tower_and_changes_nothing():
    step = towers.TowerStep(model(), "sgd", LOSS, devices=["/cpu:0", "/cpu:1", "/cpu:2"])
    before = [v.numpy() for v in step.model.weights]
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match=OUT_OF_RANGE):
            step(X, WRONG)
    np.testing.assert_equal([v.numpy() for v in step.model.weights], before)


@pytest.mark.parametrize("shape", [(12, 5), (12, 1, 1)])
def test_weights_of_another_shape_than_the_losses_are_refused(shape):
    weights, parallel = np.ones(shape, np.float32), towers.make_parallel(model(), 3)
    parallel.compile("sgd", LOSS)
    step = towers.TowerStep(model(), "sgd", LOSS, devices=["/cpu:0", "/cpu:1"])
    for train in (lambda: step(X, Y, weights), lambda: parallel.fit(X, Y, sample_weight=weights)):
        with pytest.raises(ValueError, match="^sample_weight has the shape .* values of the"):
            train()
    for right in (np.ones(12), np.ones((12, 1))):
        step(X, Y, right)


class Own(keras.Sequential):
    """A train_step that is written by hand."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.compute_loss(x, y, self(x, training=True)))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return {"loss": loss}


@pytest.mark.parametrize("kind", [keras.Sequential, Own])
def test_fit_and_evaluate_raise_the_error_of_the_tower(kind):
    parallel = towers.make_parallel(model(kind), 3)
    parallel.compile("sgd", LOSS)
    parallel.fit(X, Y, batch_size=12, verbose=0)
    before = [v.numpy() for v in parallel.weights]
    for method in (parallel.fit, parallel.evaluate) * 3:
        with pytest.raises(tf.errors.InvalidArgumentError, match=OUT_OF_RANGE):
            method(X, WRONG, batch_size=12, verbose=0)
    np.testing.assert_equal([v.numpy() for v in parallel.weights], before)


def test_without_another_error_the_cancelling_is_told():
    """Nor does what cannot run outside of a graph hide it."""
    for run, expected in [
        (lambda: None, tf.errors.CancelledError), (lambda: 1 / 0, tf.errors.CancelledError),
        (lambda: tf.ones(2) + tf.ones(3), tf.errors.InvalidArgumentError),
    ]:
        with pytest.raises(expected), first_error(run):
            raise tf.errors.CancelledError(None, None, "RecvAsync is cancelled.")


def test_values_that_an_operation_refuses_are_one_line():
    @tf.function
    def graph(x):
        tf.debugging.Assert(x < 3, ["too large [1, 2)"])
        return x

    said = r"^step 3: assertion failed: .*too large \[1, 2\).* \(in "
    with pytest.raises(ValueError, match=said), values_explained("step 3"):
        graph(tf.constant(5))
