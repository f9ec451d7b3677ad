"""The levels of a step, run on the towers' devices."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.cases import NOISE
from tests.custom_step.steps import fit, mean_square, model_with, pairs, step_of


def rows_of(step, count=8, num_towers=4, num_devices=2, method="train_step"):
    """What a step returns as "rows" for one batch."""
    model = model_with(step, method)
    model = towers.make_parallel(model, num_devices, num_towers=num_towers)
    return model.train_on_batch(*pairs(count), return_dict=True)["rows"]


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
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.CancelledError)):
        fit(model, x + 100.0, y)
