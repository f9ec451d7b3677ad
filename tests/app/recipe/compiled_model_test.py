"""Another optimizer for a compiled model, and the directions of its metrics."""

import keras
import numpy as np
import pytest

import towers
from towers.app.recipe.compiled_model import directions, recompile

X, Y = np.ones((4, 3)), np.ones((4, 2))


@pytest.fixture
def outputs():
    x = keras.Input((3,))
    return x, [keras.layers.Dense(2, name=name)(x) for name in ("a", "b")]


def test_another_optimizer_leaves_all_else_as_it_was(outputs):
    x, (a, _) = outputs
    model = keras.Model(x, a)
    model.compile("sgd", "mse", metrics=["mae"], weighted_metrics=["mse"])
    recompile(model, keras.optimizers.Adam(0.25))
    model.run_eagerly = True
    assert set(model.evaluate(X, Y, verbose=0, return_dict=True)) == {"loss", "mae", "mse"}
    assert float(model.optimizer.learning_rate) == 0.25


def test_directions_are_those_of_the_metrics(outputs):
    mean = keras.metrics.MeanMetricWrapper(lambda y, y_pred: y_pred, name="mean")
    model = keras.Model(*outputs)
    model.compile("sgd", "mse", metrics=[["accuracy", mean], ["mae"]])
    step = towers.TowerStep(model, num_towers=2)
    step.build_metrics("train", X, (Y, Y))
    assert directions(model, step.metrics.names) == {
        "loss": "down",
        "a_accuracy": "up",
        "a_mean": None,
        "b_mae": "down",
        "a_loss": "down",
        "b_loss": "down",
    }
