"""Where the towers of a step meet: what gather does, and where towers cannot meet."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import fit, fit_alike, model_with, pairs, refused, step_of


@pytest.mark.parametrize("num_towers, firsts", [(4, [0, 3, 6, 9]), (16, range(11))])
def test_gathered_rows_are_those_of_the_batch_in_order(num_towers, firsts, float64):
    def step(model, data):
        x, _ = data
        rows = towers.gather(tf.range(tf.shape(x)[0]) + tf.cast(x[:, 0], tf.int32))
        place = tf.cast(tf.range(tf.shape(rows)[0]), "float64")
        return {"ordered": tf.reduce_sum(place * tf.cast(rows, "float64"))}

    x = np.zeros((11, 4))
    x[:, 0] = 100 * np.arange(1, 12)
    model = towers.make_parallel(model_with(step), 2, num_towers=num_towers)
    starts = np.repeat(firsts, np.diff([*firsts, 11]))
    rows = x[:, 0] + np.arange(11) - starts
    assert fit(model, x, pairs()[1])["ordered"] == [np.sum(np.arange(11) * rows)]


def test_the_gradient_of_gathered_rows_reaches_every_tower(float64):
    """A variance over the batch couples all rows; a mean over a mask counts all towers' rows."""
    def spread(model, x, y):
        output = model(x)
        everywhere = towers.gather(output)
        mask = tf.cast(towers.gather(y[:, 0]) > 0, everywhere.dtype)
        masked = tf.reduce_sum(mask * everywhere[:, 0] ** 2) / (tf.reduce_sum(mask) + 1e-7)
        return masked + tf.math.reduce_variance(everywhere) + tf.reduce_mean(output ** 2)

    for num_towers in (2, 5, 16):
        fit_alike(lambda: model_with(step_of(spread)), num_towers=num_towers, batch_size=4)


def test_rows_that_the_step_returns_are_joined_and_scalars_averaged(float64):
    def step(model, data):
        x, y, _ = data
        return {"rows": x[:, 0] * 2.0, "mean": tf.reduce_mean(y), "python": 3.0}

    x, y = pairs()
    model = towers.make_parallel(model_with(step), 2, num_towers=4)
    logs = model.train_on_batch(x, y, return_dict=True)
    np.testing.assert_array_equal(logs["rows"], x[:, 0] * 2.0)
    np.testing.assert_allclose(logs["mean"], np.mean(y), rtol=1e-12)
    assert logs["python"] == 3.0


def in_function(model, data, body):
    return tf.function(body)()


def in_condition(model, data, body):
    return tf.cond(tf.reduce_sum(data[0]) > 0.0, body, lambda: tf.zeros([], data[0].dtype))


def in_loop(model, data, body):
    return tf.while_loop(lambda i, v: i < 2, lambda i, v: (i + 1, body()),
                         [0, tf.zeros([], data[0].dtype)])[1]


@pytest.mark.parametrize("where", [in_function, in_condition, in_loop])
@pytest.mark.parametrize("what", ["gather", "gradient", "apply", "assign", "metric"])
def test_towers_do_not_meet_in_a_condition_a_loop_or_a_function(where, what):
    mean = keras.metrics.Mean(name="mine")

    def step(model, data):
        x, _ = data
        weight = model.trainable_weights[0]

        def body():
            if what == "gather":
                return tf.reduce_mean(towers.gather(x))
            if what == "gradient":
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(model(x))
                return tf.reduce_sum(tape.gradient(loss, weight))
            if what == "apply":
                model.optimizer.apply_gradients([(tf.ones_like(weight), weight)])
            if what == "assign":
                weight.assign(2.0 * weight)
            if what == "metric":
                mean.update_state(tf.reduce_mean(x))
            return tf.reduce_sum(x)

        return {"loss": where(model, data, body)}

    message = refused(step)
    for word in ("step_collectives_test.py", "tf.where", "tf.function"):
        assert word in message
