"""The gradients of a convolution's bias and filter never read the same tensor.

That they stay what they are is seen in conformance/gradients_test.py.
"""

import keras
import numpy as np
import pytest

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
