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


@pytest.mark.parametrize("use, result, after", [
    (lambda v: v * 2.0, [2, 4, 6], [1, 2, 3]),
    (lambda v: tf.gather(v, [2, 0]), [3, 1], [1, 2, 3]),
    (lambda v: tf.gather_nd(v, [[1]]), [2], [1, 2, 3]),
    (lambda v: v[1:], [2, 3], [1, 2, 3]),
    (lambda v: tf.nn.embedding_lookup(v, [1]), [2], [1, 2, 3]),
    (lambda v: v.assign([4.0, 5.0, 6.0]), [4, 5, 6], [4, 5, 6]),
    (lambda v: v.assign_add([1.0, 1.0, 1.0]) + v, [4, 6, 8], [2, 3, 4]),
    (lambda v: v.assign_sub(v) + 1.0, [1, 1, 1], [0, 0, 0]),
])
def test_reads_and_assignments_are_the_scopes(use, result, after):
    variable = tf.Variable([1.0, 2.0, 3.0])
    assert traced(use, variable) == [result, after]
    assert variable.numpy().tolist() == [1, 2, 3]  # nothing of it reaches the variable
    assert variable.assign_add([1.0, 1.0, 1.0]).numpy().tolist() == [2, 3, 4]  # until it is over


def test_other_threads_see_tensorflows_own():
    import threading

    mine, others = tf.Variable(1.0), tf.Variable(1.0)
    seen = []

    def use(variable):
        thread = threading.Thread(target=lambda: seen.append(others.assign_add(1.0).numpy()))
        thread.start()
        thread.join()
        return variable * 1.0

    traced(use, mine)
    assert seen == [2.0] and others.numpy() == 2.0


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
