"""What one tower computes of its shard, seen through a step; and when a step is traced."""

import collections
import inspect
from contextlib import contextmanager

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import towers
from tests.step import small_step
from towers.divide.tower_step import TowerStep
from towers.divide.prefetch import place

L = keras.layers
JOINED = "_MklNativeConv2DBackpropFilterWithBias"  # a bias' gradient with the filter's


# Graphs


def test_a_structure_is_traced_once_whatever_the_number_of_rows_and_placed_shards_anew():
    step = small_step.make_step(layers=small_step.plain, num_towers=2)
    for count in (8, 3, 5):
        x, y = small_step.batch(count)
        step(x, y)
    assert len(step.traces) == 1
    step(x, y, np.ones(5))
    step.train_batch(x, y, placed=place(step.machine, (x, y, None)))
    assert len(step.traces) == 3


def test_arrays_lie_in_the_cpus_memory_whatever_the_default_device_and_tensors_where_they_are(
    monkeypatch,
):
    """Else the first GPU would take a whole batch, which then came back to be split."""
    seen = []

    @contextmanager
    def noting(undivided):
        seen.extend(tf.nest.flatten(undivided.args))
        yield

    monkeypatch.setattr("towers.divide.tower_step.first_error", noting)
    step, (x, y) = small_step.make_step(layers=small_step.plain), small_step.batch(8)
    with tf.device("/cpu:3"):  # a default device, as /gpu:0 is one
        step.test_batch(x, tf.identity(tf.constant(y)))
    assert [part.device[-5:] for part in seen[:2]] == ["CPU:0", "CPU:3"]


def test_a_call_reaches_the_model_through_eleven_functions():
    walk = []

    class Looks(L.Layer):
        def call(self, x):
            files = [frame.filename for frame in inspect.stack(0)]
            walk[:] = [name for name in files if "/towers/" in name and "/tests/" not in name]
            return x

    model = keras.Sequential([keras.Input((6,)), Looks(), L.Dense(1)])
    towers.TowerStep(model, "sgd", "mse", num_towers=2)(np.ones((4, 6)), np.ones((4, 1)))
    assert len(walk) <= 11


def filters():
    """A filter of one call, and a shared one."""
    x = keras.Input((6, 6, 2))
    shared = L.Conv2D(2, 3, padding="same")
    rows = shared(shared(L.Conv2D(2, 3, activation="relu")(x)))
    return keras.Model(x, L.Dense(2)(L.Flatten()(rows)))


def events_in(directory):
    """Yields the name and the integers of each event of a profile."""
    (path,) = directory.glob("plugins/profile/*/*.xplane.pb")
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = {plane.stat_metadata[s.metadata_id].name: s.int64_value for s in event.stats}
            yield plane.event_metadata[event.metadata_id].name, stats


def operations_in(directory):
    """How many operations of each type ran; their events are called "node:type"."""
    return collections.Counter(name.rpartition(":")[2] for name, _ in events_in(directory))


def test_no_gradient_of_a_bias_is_joined_with_a_filters(tmp_path):
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype("float32") for shape in [(4, 6, 6, 2), (4, 2)])
    step = TowerStep(filters(), "sgd", "mse", devices=["/cpu:0"])
    step.gradients(x, y)  # traces it
    with tf.profiler.experimental.Profile(str(tmp_path)):
        step.gradients(x, y)
    found = operations_in(tmp_path)
    if not any(kind.startswith("_MklNativeConv2D") for kind in found):
        pytest.skip("oneDNN computes no convolution here: there is nothing to join")
    assert found[JOINED] == 0 and found["BiasAddGrad"] >= 2


def bytes_allocated(step, x, y, directory):
    """The sizes of what a step allocates, by a profile."""
    with tf.profiler.experimental.Profile(str(directory)):
        step.train_batch(x, y)
    events = events_in(directory)
    return [stats["requested_bytes"] for name, stats in events if name == "MemoryAllocation"]


def test_the_first_step_makes_no_zeros_in_place_of_gradients(tmp_path):
    """TensorFlow's graph optimizer computes what follows from shapes alone."""
    kernel = 1000 * 1000 * 4  # bytes
    model = keras.Sequential([keras.Input((1000,)), L.Dense(1000)])
    step = TowerStep(model, "sgd", "mse", devices=towers.tower_devices(2))
    x = np.ones((4, 1000), "float32")
    first, second = (bytes_allocated(step, x, x, tmp_path / name) for name in ("first", "second"))
    if not second:
        pytest.skip("oneDNN computes no product here: no other allocator notes what it gives")
    assert first.count(kernel) == second.count(kernel) > 0
