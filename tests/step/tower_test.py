"""What one tower computes of its shard, seen through a step."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers

L = keras.layers


def make_step(model, loss, num_towers):
    return towers.TowerStep(model, "sgd", loss, devices=["/cpu:0"], num_towers=num_towers)


class HalfSquares(keras.Sequential):
    """A loss of its own, which is a sum."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.nn.l2_loss(y_pred - y)


@pytest.mark.parametrize("num_towers", [2, 5])  # with ragged, and with empty shards
def test_a_sum_that_a_models_own_loss_is_counts_by_its_rows(num_towers, float64):
    model = HalfSquares([keras.Input((4,)), L.Dense(2)])
    model.compile("sgd")
    step = towers.TowerStep(model, devices=["/cpu:0"], num_towers=num_towers)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 4)), rng.normal(size=(3, 2))
    with tf.GradientTape() as tape:
        expected = tf.nn.l2_loss(model(x) - y)
    loss, gradients = step.gradients(x, y)
    for ours, theirs in [
        (loss, expected), (step.test_batch(x, y)["loss"], expected),
        *zip(gradients, tape.gradient(expected, model.trainable_variables), strict=True),
    ]:
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


class AddsItsRoot(L.Layer):
    def call(self, x):
        self.add_loss(tf.sqrt(tf.reduce_mean(x**2)))
        return x


@pytest.mark.parametrize("method", ["train", "test"])
def test_an_added_loss_that_is_no_mean_is_warned_of_with_its_line(method):
    model = keras.Sequential([keras.Input((4,)), AddsItsRoot(), L.Dense(2)])
    line = inspect.getsourcelines(AddsItsRoot)[1] + 2
    with pytest.warns(UserWarning, match=rf"^tower_test.py:{line} takes Sqrt .*towers.gather"):
        make_step(model, "mse", 2).trace_tower(method, tf.ones([3, 4]), tf.ones([3, 2]), None)


def test_the_weights_of_masks_follow_from_the_inputs_alone():
    """What they are computed from, in the traced graph: no forward pass."""
    model = keras.Sequential([
        keras.Input((5,), dtype="int32"), L.Embedding(9, 4, mask_zero=True),
        L.Dense(3, activation="softmax"),
    ])
    tokens = tf.constant([[1, 2, 0, 0, 0], [3, 4, 5, 0, 0]])
    step = make_step(model, "sparse_categorical_crossentropy", 2)
    graph = step.tower.trace("train", (tokens, tf.ones_like(tokens), None))[1].function.graph
    needed, left = set(), [*graph.control_outputs, *(t.op for t in graph.outputs)]
    while left:
        operation = left.pop()
        if operation not in needed:
            needed.add(operation)
            left += [*operation.control_inputs, *(tensor.op for tensor in operation.inputs)]
    kinds = [operation.type for operation in graph.get_operations()]
    assert "MatMul" in kinds and "MatMul" not in {operation.type for operation in needed}
