"""The calls that are replaced while a step is traced."""

import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.own_step.steps import fit, fit_alike, model_with, pairs, refused


def calls():
    optimizer, metric = keras.optimizers.Optimizer, keras.metrics.Mean
    return [tf.GradientTape.gradient, keras.losses.Loss.__call__, keras.layers.Layer.__call__,
            optimizer.apply, metric.update_state, keras.optimizers.LossScaleOptimizer.apply]


def test_nothing_stays_replaced():
    before = calls()
    own = [name for cls in keras.optimizers.Optimizer.__subclasses__() for name in vars(cls)]

    def step(model, data):
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        fit(towers.make_parallel(model_with(step), 2))
    assert calls() == before
    assert own == [n for cls in keras.optimizers.Optimizer.__subclasses__() for n in vars(cls)]


def test_another_thread_sees_the_calls_as_they_are():
    """While a step is traced, a metric elsewhere counts by itself."""
    other, found = keras.metrics.Mean(), []

    def update_elsewhere():
        other.update_state(4.0)
        variable = keras.Variable(3.0)
        with tf.GradientTape() as tape:
            square = variable * variable
        found.append(float(tape.gradient(square, variable)))

    def step(model, data):
        thread = threading.Thread(target=update_elsewhere)
        thread.start()
        thread.join()
        return {"loss": tf.reduce_mean(data[0])}

    fit(towers.make_parallel(model_with(step), 2))
    assert other.result() == 4.0 and other.count.numpy() == 1.0
    assert found == [6.0]


def test_weights_and_rows_in_one_gradient_are_refused():
    def step(model, data):
        x, _ = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(model(x))
        tape.gradient(loss, [x, *model.trainable_weights])
        return {"loss": loss}

    message = refused(step)
    assert "patches_test.py:" in message and "persistent=True" in message


def test_checkpointing_is_refused():
    def step(model, data):
        hidden = keras.remat(lambda rows: tf.tanh(model.layers[0](rows)))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(hidden(data[0]) ** 2)
        tape.gradient(loss, model.trainable_weights[:2])
        return {"loss": loss}

    message = refused(step)
    assert "patches_test.py:" in message and "keras.remat" in message


def test_a_batch_size_in_the_code_is_refused_by_the_layer_that_it_meets():
    seed = keras.random.SeedGenerator(1)

    def step(model, data):
        noise = keras.random.normal([11, 4], seed=seed)
        return {"loss": tf.reduce_mean(model.layers[0](noise))}

    message = refused(step)
    assert "'hidden'" in message and "11 rows" in message and "tf.shape(x)[0]" in message


def test_a_fixed_input_that_all_towers_share_is_no_batch(float64):
    def step(model, data):
        grid = tf.reshape(tf.range(12.0), [3, 4])
        return {"loss": tf.reduce_mean(model.layers[0](grid)) + tf.reduce_mean(data[0])}

    fit_alike(lambda: model_with(step))


def test_a_sum_that_is_taken_for_a_mean_is_warned_of():
    def step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(
                tf.reduce_mean((model(x) - y) ** 2, axis=1), global_batch_size=11)
        tape.gradient(loss, model.trainable_weights)
        return {"loss": loss}

    with pytest.warns(UserWarning, match=r"patches_test.py:\d+ .*reduce_mean"):
        fit(towers.make_parallel(model_with(step), 2))


def weighted_loss(model, data):
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return loss(data[1], model(data[0]), sample_weight=data[1][:, 0])


def test_a_mean_over_something_else_than_examples_is_warned_of():
    def step(model, data):
        embedded = keras.ops.stack([data[0], data[0]], axis=1)
        masked = masking(embedded)
        return {"loss": keras.losses.MeanSquaredError()(tf.zeros_like(masked), masked)}

    masking = keras.layers.Masking()
    with pytest.warns(UserWarning, match="patches_test.*steps that its mask leaves.*gather"):
        fit(towers.make_parallel(model_with(step), 2))
    with pytest.warns(UserWarning, match="patches_test.*sample weights.*gather"):
        fit(towers.make_parallel(
            model_with(lambda model, data: {"loss": weighted_loss(model, data)}), 2))


def test_a_loss_over_examples_is_not_warned_of():
    def step(model, data):
        return {"loss": keras.losses.MeanSquaredError()(
            data[1], model(data[0]), sample_weight=data[1][:, 0])}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(towers.make_parallel(model_with(step), 2))


def gradients_of_rows(model, x, y):
    """The slope of a mean, and of a sum, over the batch with respect to its rows."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        mean = tf.reduce_mean((model(x) - y) ** 2)
        total = tf.reduce_sum((model(x) - y) ** 2)
    return tape.gradient(mean, x), tape.gradient(total, x)


def test_gradients_with_respect_to_rows_are_those_of_the_whole_batch(float64):
    def step(model, data):
        of_mean, of_sum = gradients_of_rows(model, *data)
        return {"mean": tf.reduce_mean(tf.norm(of_mean, axis=1)),
                "sum": tf.reduce_mean(tf.norm(of_sum, axis=1))}

    for num_towers in (3, 16):
        fit_alike(lambda: model_with(step), num_towers=num_towers, batch_size=7)


def test_a_direction_in_which_each_row_loses_most_is_finite_in_empty_shards(float64):
    """Virtual adversarial training: zeros that are normalized would be NaN, for all towers."""
    def step(model, data):
        x, y = data
        slope, _ = gradients_of_rows(model, x, y)
        with tf.GradientTape() as tape:
            worse = x + 0.1 * slope / tf.norm(slope, axis=1, keepdims=True)
            loss = tf.reduce_mean((model(worse) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_weights)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights))
        return {"loss": loss}

    theirs, ours = fit_alike(lambda: model_with(step), num_towers=16, batch_size=7)
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-10)


def test_a_jacobian_with_respect_to_weights_is_the_shards_own(float64):
    def step(model, data):
        with tf.GradientTape() as tape:
            output = model(data[0])
        slopes = tape.jacobian(output, model.trainable_weights[0])
        return {"loss": tf.reduce_mean(slopes ** 2)}

    fit_alike(lambda: model_with(step), batch_size=6, num_towers=3)


def test_jacobians_are_row_by_row(float64):
    def step(model, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                output = model(x)
            slopes = tape.batch_jacobian(output, x)
            loss = tf.reduce_mean(slopes ** 2) + tf.reduce_mean((output - y) ** 2)
        gradients = outer.gradient(loss, model.trainable_weights, unconnected_gradients="zero")
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights))
        return {"loss": loss}

    theirs, ours = fit_alike(lambda: model_with(step), batch_size=4)
    for a, b in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-10)


def test_a_gradient_of_weights_alone_needs_no_tower(float64):
    def step(model, data):
        weight = model.trainable_weights[0]
        with tf.GradientTape() as tape:
            penalty = tf.reduce_sum(weight ** 2)
        gradient = tape.gradient(penalty, weight)
        model.optimizer.apply_gradients([(gradient, weight)])
        return {"loss": penalty, "mean": tf.reduce_mean(data[0])}

    fit_alike(lambda: model_with(step), num_towers=3)


class Halves(keras.optimizers.SGD):
    """A user's optimizer with an `apply` of its own."""

    def apply(self, grads, trainable_variables=None):
        super().apply([g / 2.0 for g in grads], trainable_variables)


def test_an_optimizer_with_an_apply_of_its_own_is_called_once_at_home(float64):
    def step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_weights)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_weights))
        return {"loss": loss}

    def make():
        model = model_with(step)
        model.compile(Halves(0.5), jit_compile=False)
        return model

    _, ours = fit_alike(make, *pairs(), batch_size=4)
    assert ours.optimizer.iterations.numpy() == 3
