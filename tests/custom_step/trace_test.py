"""A step, traced once for one tower."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import fit, fit_alike, mean_square, model_with, pairs, step_of


def counting(times):
    def step(model, data):
        times.append(1)
        return {"loss": tf.reduce_mean(model(data[0]))}

    return step


@pytest.mark.parametrize("num_towers", [1, 8])
def test_python_runs_the_step_once_whatever_the_number_of_towers_and_rows(num_towers):
    times = []
    model = towers.make_parallel(model_with(counting(times)), 2, num_towers=num_towers)
    fit(model, *pairs(22), batch_size=5, epochs=2)
    assert len(times) == 1
    fit(model, pairs(22)[0].astype("int32"), pairs(22)[1])
    assert len(times) == 2, "another structure"


class Unbuilt(keras.Model):
    """Makes its variables, and its metric's, on the first batch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(3), keras.layers.Dense(2)

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        return super().train_step(data)


def test_a_model_that_is_not_built_is_built_by_its_step(float64):
    def make():
        model = Unbuilt()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        return model

    _, ours = fit_alike(make, batch_size=4, num_towers=3)
    assert ours.built and len(ours.weights) == 4
    assert all(variable.value.device.endswith("CPU:0") for variable in ours.variables)


class MadeLater(keras.Model):
    """Makes its optimizer's slots in the step, between two updates of a metric."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean = keras.layers.Dense(2), keras.metrics.Mean(name="mean")

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, data):
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                each = tf.reduce_sum((self.layer(x) - y) ** 2, axis=1)
            weights = self.layer.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(each, weights), weights))
            self.mean.update_state(each)
        return {"mean": self.mean.result()}


def test_a_metric_is_updated_twice_in_a_step_that_makes_variables(float64):
    def make():
        model = MadeLater()
        model.compile(optimizer="adam", jit_compile=False)
        return model

    fit_alike(make, batch_size=4)


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
