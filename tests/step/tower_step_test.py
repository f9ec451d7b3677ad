"""A TowerStep's graphs: traced once for a structure, fed from the CPU's memory."""

import inspect
from contextlib import nullcontext

import keras
import numpy as np
import tensorflow as tf

import towers
from tests.step.small_step import batch, make_step
from towers.step.prefetch import place


def test_a_structure_is_traced_once_whatever_the_number_of_rows_and_placed_shards_anew():
    step = make_step()
    for count in (8, 3, 5):
        x, y = batch(count)
        step(x, y)
    assert len(step.traces) == 1
    step(x, y, np.ones(5))
    step.train_batch(x, y, placed=place(step, (x, y, None)))
    assert len(step.traces) == 3


def test_arrays_lie_in_the_cpus_memory_whatever_the_default_device_and_tensors_where_they_are(
    monkeypatch
):
    """Else the first GPU would take a whole batch, which then came back to be split."""
    seen = []
    module = "towers.step.tower_step"
    monkeypatch.setattr(f"{module}.run_in_turn", lambda step, name, *batch: seen.extend(batch))
    monkeypatch.setattr(f"{module}.first_error", lambda run: run() or nullcontext())
    step, (x, y) = make_step(), batch(8)
    with tf.device("/cpu:3"):  # a default device, as /gpu:0 is one
        step.test_batch(x, tf.identity(tf.constant(y)))
    assert [part.device[-5:] for part in seen[:2]] == ["CPU:0", "CPU:3"]


def test_a_call_reaches_the_model_through_eight_functions():
    walk = []

    class Looks(keras.layers.Layer):
        def call(self, x):
            files = [frame.filename for frame in inspect.stack(0)]
            walk[:] = [name for name in files if "/towers/step/" in name and "/tests/" not in name]
            return x

    model = keras.Sequential([keras.Input((6,)), Looks(), keras.layers.Dense(1)])
    towers.TowerStep(model, "sgd", "mse", num_towers=2)(np.ones((4, 6)), np.ones((4, 1)))
    assert len(walk) <= 8
