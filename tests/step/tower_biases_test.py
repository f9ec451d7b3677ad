"""What a tower runs on the CPU: a bias' gradient apart from the filter's."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from towers.step import TowerStep

L = keras.layers
JOINED = "_MklNativeConv2DBackpropFilterWithBias"


def plain():
    return keras.Sequential([keras.Input((6, 6, 2)), L.Conv2D(3, 3, activation="relu"),
                             L.Conv2D(4, 3), L.Flatten(), L.Dense(2)])


def shared():
    x = keras.Input((6, 6, 2))
    conv = L.Conv2D(2, 3, padding="same")
    return keras.Model(x, L.Dense(2)(L.Flatten()(conv(conv(x)))))


def operations_in(directory):
    """How many operations of each type ran, by a profile; its events are called "node:type"."""
    (path,) = directory.glob("plugins/profile/*/*.xplane.pb")
    planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    return collections.Counter(
        plane.event_metadata[event.metadata_id].name.rpartition(":")[2]
        for plane in planes for line in plane.lines for event in line.events
    )


@pytest.mark.parametrize("make", [plain, shared])
def test_no_gradients_are_joined_but_for_this(make, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype("float32") for shape in [(4, 6, 6, 2), (4, 2)])

    def operations():
        step = TowerStep(make(), "sgd", "mse", devices=["/cpu:0"])
        step.gradients(x, y)  # traces it
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        with tf.profiler.experimental.Profile(str(directory)):
            step.gradients(x, y)
        return operations_in(directory)

    with_it = operations()
    monkeypatch.setattr("towers.step.tower.keep_biases_apart", lambda graph: None)
    without = operations()
    if not any(kind.startswith("_MklNativeConv2D") for kind in without):
        pytest.skip("oneDNN computes no convolution here: there is nothing to join")
    assert without[JOINED] > 0
    assert with_it[JOINED] == 0
    assert with_it["BiasAddGrad"] == without["BiasAddGrad"] + without[JOINED]
