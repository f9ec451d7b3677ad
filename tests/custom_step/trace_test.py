"""A step: traced once for one tower, run on their devices, and where its towers meet."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.cases import NOISE
from tests.custom_step.steps import fit, fit_alike, mean_square, model_with, pairs, refused, step_of


def counting(times):
    def step(model, data):
        times.append(1)
        return {"loss": tf.reduce_mean(model(data[0]))}

    return step


@pytest.mark.telling("8")
@pytest.mark.parametrize("num_towers", [1, 8])
def test_python_runs_the_step_once_whatever_the_number_of_towers_and_rows(num_towers):
    times = []
    model = towers.make_parallel(model_with(counting(times)), 2, num_towers=num_towers)
    fit(model, *pairs(22), batch_size=5, epochs=2)
    assert len(times) == 1
    fit(model, pairs(22)[0].astype("int32"), pairs(22)[1])
    assert len(times) == 2, "another structure"


class Unbuilt(keras.Model):
    """Makes its variables, and its metric's, on the first batch, between two updates of another."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(3), keras.layers.Dense(2)
        self.twice = keras.metrics.Mean(name="twice")

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        weights = self.trainable_weights  # none in the trace that makes them
        with tf.GradientTape() as tape:
            each = tf.reduce_sum((self(data[0], training=True) - data[1]) ** 2, axis=1)
        self.twice.update_state(each)
        self.optimizer.apply(tape.gradient(each, weights), weights)
        logs = super().train_step(data)
        self.twice.update_state(2.0 * each)
        return {**logs, "twice": self.twice.result()}


def test_a_model_that_is_not_built_is_built_by_its_step(float64):
    def make():
        model = Unbuilt()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        return model

    _, ours = fit_alike(make, batch_size=4, num_towers=3, eagerly=False)
    assert ours.built and len(ours.weights) == 4
    assert all(variable.value.device.endswith("CPU:0") for variable in ours.variables)


def test_a_decorated_step_is_undone():
    model = towers.make_parallel(model_with(tf.function(step_of(mean_square))), 2)
    before = model.get_weights()
    assert np.isfinite(fit(model)["loss"]).all()
    assert np.any(before[0] != model.get_weights()[0])


def test_a_lookup_table_is_read_as_in_keras():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [5.0, 6.0]), 7.0)

    def step(model, data):
        factors = tf.cast(table.lookup(tf.cast(data[0] > 0, tf.int32)), data[0].dtype)
        return {"loss": tf.reduce_mean(data[0] * factors) + tf.cast(table.size(), factors.dtype)}

    fit_alike(lambda: model_with(step), batch_size=5)


def test_values_from_outside_and_keras_variables_are_used(float64):
    constant, variable = tf.constant([1.0, 2.0, 3.0, 4.0], "float64"), keras.Variable(3.0)
    grid, mean = tf.ones([3, 4], "float64"), keras.metrics.Mean()

    def step(model, data):
        mean.update_state(constant)
        return {"loss": tf.reduce_mean(data[0] * constant) * variable,
                "grid": tf.reduce_mean(model.layers[0](grid)), "variable": variable,
                "gathered": tf.reduce_sum(towers.gather(constant)), "constant": constant[0]}

    fit_alike(lambda: model_with(step))


def rows_of(step, count=8, num_towers=4, num_devices=2, method="train_step"):
    """What a step returns as "rows" for one batch."""
    model = model_with(step, method)
    model = towers.make_parallel(model, num_devices, num_towers=num_towers)
    return model.train_on_batch(*pairs(count), return_dict=True)["rows"]


@pytest.mark.matrix
def test_towers_draw_other_noise():
    keras.utils.set_random_seed(1)  # tf.random's too: its operations get seeds of the graph
    seed = keras.random.SeedGenerator(3)

    for draw in (
        lambda shape: keras.random.normal(shape, seed=seed), tf.random.normal, tf.random.uniform,
        lambda shape: tf.random.normal(shape, seed=5), tf.random.truncated_normal,
        *(lambda shape, draw=draw: draw(tf.zeros(shape)) for draw in NOISE.values()),
    ):
        rows = rows_of(lambda model, data: {"rows": draw([tf.shape(data[0])[0]])})
        assert len(np.unique(rows)) == 8


def test_a_frozen_seed_of_tower_0_is_kerass():
    """The first tower draws what Keras would draw first, and the seed advances once."""
    seed, other = keras.random.SeedGenerator(3), keras.random.SeedGenerator(3)
    rows = rows_of(lambda model, data: {
        "rows": keras.random.normal([tf.shape(data[0])[0]], seed=seed)})
    np.testing.assert_array_equal(rows[:2], keras.random.normal([2], seed=other))
    np.testing.assert_array_equal(seed.state.numpy(), other.state.numpy())


def test_each_towers_operations_run_on_its_device_and_the_update_at_home():
    model = towers.make_parallel(model_with(step_of(mean_square)), 4, num_towers=8)

    @tf.function(autograph=False)
    def run(x, y):
        return model.train_step((x, y))

    fit(model)
    batch = [v.astype("float32") for v in pairs(16)]
    operations = run.get_concrete_function(*batch).graph.get_operations()
    devices = [int(op.device[-1]) for op in operations
               if op.name.startswith("tower_") and "PartitionedCall" in op.type]
    assert devices == [0, 0, 1, 1, 2, 2, 3, 3]
    updates = [op for op in operations if "Assign" in op.type]
    assert updates and all(op.device.endswith("CPU:0") for op in updates)


def test_prints_and_assertions_run(capfd):
    def step(model, data):
        tf.print("seen", tf.shape(data[0])[0])
        tf.debugging.assert_less(data[0], 50.0, message="far out")
        return {"loss": tf.reduce_mean(data[0])}

    model = towers.make_parallel(model_with(step), 2, num_towers=2)
    x, y = pairs(7)
    fit(model, x, y)
    assert sorted(capfd.readouterr().err.split("\n"))[-2:] == ["seen 3", "seen 4"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="far out"):
        fit(model, x + 100.0, y)


@pytest.mark.telling("4-*")
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

    fit_alike(lambda: model_with(step_of(spread)), num_towers=5, batch_size=4)


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


@pytest.mark.telling(
    "gather-loop", "gradient-function", "apply-condition", "assign-loop", "metric-condition")
@pytest.mark.parametrize("where", [
    lambda x, body: tf.function(body)(),
    lambda x, body: tf.cond(tf.reduce_sum(x) > 0.0, body, lambda: tf.zeros([], x.dtype)),
    lambda x, body: tf.while_loop(
        lambda i, v: i < 2, lambda i, v: (i + 1, body()), [0, tf.zeros([], x.dtype)])[1],
], ids=["function", "condition", "loop"])
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

        return {"loss": where(x, body)}

    message = refused(step)
    for word in ("trace_test.py", "tf.where", "tf.function"):
        assert word in message
