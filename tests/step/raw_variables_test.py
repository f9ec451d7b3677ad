"""A tf.Variable, while a tower is traced, is read and assigned in the tower's scope alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.step.assigned import TowerScope
from towers.step.raw_variables import raw_variables_in

L = keras.layers


def traced(use, variable):
    """(what `use(variable)` returns in a scope, what the scope then has of the variable)."""
    def body():
        scope = TowerScope([], 0)
        with scope, raw_variables_in(scope):
            result = use(variable)
            (known,) = scope.unknown.values()
        return result, scope.get_current_value(known)

    return [v.numpy().tolist() for v in tf.function(body, autograph=False)()]


class Scatters(L.Layer):
    """Assigns a part of its variable."""

    def __init__(self):
        super().__init__()
        self.table = tf.Variable([1.0, 2.0], name="table")

    def call(self, x):
        self.table.scatter_nd_update([[0]], [3.0])
        return x * self.table


def test_what_towers_cannot_follow_is_refused_with_its_line():
    model = keras.Sequential([keras.Input((2,)), Scatters()])
    step = towers.TowerStep(model, "sgd", "mse", devices=["/cpu:0"], num_towers=2)
    x = np.ones((4, 2), "float32")
    with pytest.raises(ValueError, match="raw_variables_test.py:.* 'table.*add_weight"):
        step(x, x)
