"""The gradients of a convolution's bias and filter never read the same tensor."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.gradients import keep_biases_apart
from towers.step import TowerStep

L = keras.layers


def plain():
    return keras.Sequential([keras.Input((6, 6, 2)), L.Conv2D(3, 3, activation="relu"),
                             L.Conv2D(4, 3), L.Flatten(), L.Dense(2)])


def shared():
    x = keras.Input((6, 6, 2))
    conv = L.Conv2D(2, 3, padding="same")
    return keras.Model(x, L.Dense(2)(L.Flatten()(conv(conv(x)))))


def regularized():
    return keras.Sequential([keras.Input((6, 6, 2)), L.Conv2D(3, 3, bias_regularizer="l2"),
                             L.Flatten(), L.Dense(2)])


@pytest.fixture(params=["float32", "mixed_bfloat16"])
def precision(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("build, convolutions", [(plain, 2), (shared, 2), (regularized, 1)])
def test_no_gradient_of_a_bias_shares_its_input_with_a_filters(build, convolutions):
    step = TowerStep(build(), "sgd", "mse")
    step(np.ones((4, 6, 6, 2), "float32"), np.ones((4, 2), "float32"))
    (tower,) = step._tower._traced.values()
    operations = tower.graph.get_operations()
    of_filters = [op.inputs[2].name for op in operations if op.type == "Conv2DBackpropFilter"]
    of_biases = [op.inputs[0].name for op in operations if op.type == "BiasAddGrad"]
    assert len(of_filters) == convolutions
    assert len(of_biases) == convolutions + 1  # the dense layer's
    assert not set(of_filters) & set(of_biases)


@pytest.mark.parametrize("data_format, axes", [("NHWC", (0, 1, 2)), ("NCHW", (0, 2, 3))])
def test_the_gradient_stays_the_sum_over_all_but_the_channels(data_format, axes):
    weights = np.random.default_rng(0).integers(-9, 9, (2, 5, 5, 5)).astype("float32")

    @tf.function(autograph=False)
    def gradient(bias):
        with tf.GradientTape() as tape:
            tape.watch(bias)
            value = tf.nn.bias_add(tf.zeros(weights.shape), bias, data_format)
            loss = tf.reduce_sum(value * weights)
        result = tape.gradient(loss, bias)
        keep_biases_apart(tf.compat.v1.get_default_graph())
        return result

    np.testing.assert_array_equal(gradient(tf.zeros([5])), weights.sum(axes))
