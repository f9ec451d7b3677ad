"""What a tower runs on the CPU: a bias' gradient apart from the filter's, and the same values."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers.step import TowerStep

L = keras.layers
JOINED = "_MklNativeConv2DBackpropFilterWithBias"
# A float32 sum over 4 x 6 x 6 values in another order; bfloat16 keeps 8 bits of each product.
TOLERANCE = {"float32": 1e-5, "mixed_bfloat16": 0.05}


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


@pytest.fixture(params=TOLERANCE)
def precision(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


def operations_in(directory):
    """How many operations of each type ran, by a profile; its events are called "node:type"."""
    (path,) = directory.glob("plugins/profile/*/*.xplane.pb")
    planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    return collections.Counter(
        plane.event_metadata[event.metadata_id].name.rpartition(":")[2]
        for plane in planes for line in plane.lines for event in line.events
    )


@pytest.fixture(params=[plain, shared, regularized])
def gradients(request, precision, tmp_path, monkeypatch):
    """is_apart -> (the gradients of a batch, how many operations of each type gave them)."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype("float32") for shape in [(4, 6, 6, 2), (4, 2)])

    def compute(is_apart):
        if not is_apart:
            monkeypatch.setattr("towers.step.tower.keep_biases_apart", lambda graph: None)
        keras.utils.set_random_seed(0)
        step = TowerStep(request.param(), "sgd", "mse", devices=["/cpu:0"])
        step.gradients(x, y)  # traces it
        with tf.profiler.experimental.Profile(str(tmp_path / str(is_apart))):
            _, values = step.gradients(x, y)
        return values, operations_in(tmp_path / str(is_apart))

    return compute


def test_no_gradients_are_joined_but_for_this(gradients):
    _, with_it = gradients(is_apart=True)
    _, without = gradients(is_apart=False)
    if not any(kind.startswith("_MklNativeConv2D") for kind in without):
        pytest.skip("oneDNN computes no convolution here: there is nothing to join")
    assert without[JOINED] > 0
    assert with_it[JOINED] == 0
    assert with_it["BiasAddGrad"] == without["BiasAddGrad"] + without[JOINED]
