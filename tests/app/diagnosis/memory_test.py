"""The estimated memory of towers: by hand, against a limit, and against a measured process."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from towers import TowerStep
from towers.app.diagnosis import memory
from towers.machine.devices import GPU, tower_devices

ROOT = Path(__file__).parents[3]
L = keras.layers
MEASURE = """
import keras, numpy as np, towers
from tests.app.diagnosis import memory_test
from towers.app.diagnosis import memory

def kib(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])

model = memory_test.convolutions(norm=True)
step = towers.TowerStep(model, "sgd", "mse", num_towers=1, jit_compile=False)
x, y = np.ones((256, 32, 32, 3), "float32"), np.zeros((256, 10), "float32")
for _ in range(2):
    step(x[:2], y[:2])  # traces
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak
step(x, y)
found = memory.tower_memory(step.phases(), 256)
print((found.activations() + found.gradients) / 1024 / (kib("VmHWM") - before))
"""
# Each large buffer goes back to the system when it is freed.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_MMAP_MAX_": "1000000", "MALLOC_ARENA_MAX": "1"}


def convolutions(norm=False):
    layers = []
    for _ in range(4):
        layers += [L.Conv2D(16, 3, padding="same"), *[L.BatchNormalization()] * norm, L.ReLU()]
    return keras.Sequential(
        [keras.Input((32, 32, 3)), *layers, L.GlobalAveragePooling2D(), L.Dense(10)]
    )


def traced(model, **options):
    step = TowerStep(model, "adam", "mse", **options)
    specs = tf.TensorSpec([None, *model.input_shape[1:]]), tf.TensorSpec([None, 10])
    step.build_metrics("train", *specs)
    return step


def test_a_tower_holds_each_activation_once_and_its_gradients():
    """Each layer's output is overwritten by its ReLU, and read again in the backward pass."""
    step = traced(convolutions(), num_towers=1)
    found = memory.tower_memory(step.phases(), 8)
    gradients = 4 * sum(
        v.shape.num_elements() for v in map(tf.convert_to_tensor, step.model.weights)
    )
    assert gradients <= found.gradients < gradients + 100  # and the loss
    output = 4 * 8 * 32 * 32 * 16
    assert 5 * output <= found.activations() < 5.1 * output  # and the gradient of one of them
    assert found.activations(3) < 1.1 * found.activations()  # the others wait with little
    assert found.shard == 4 * 8 * (32 * 32 * 3 + 10)


def test_a_dropout_counts_with_its_mask_and_output():
    """A backward pass sums its gradient over axes that are known only when it runs."""
    layers = [L.Dense(512), L.Dropout(0.5), L.Dense(10)]
    step = traced(keras.Sequential([keras.Input((4,)), *layers]), num_towers=1)
    found = memory.tower_memory(step.phases(), 1024)
    assert 4 * 1024 * 512 < found.activations() < 6 * 4 * 1024 * 512


def test_a_recurrent_layer_counts_with_what_it_keeps_of_each_time_step():
    """The input of 16 numbers, and the state of 32, which the next step and the output have, too."""
    model = keras.Sequential([keras.Input((50, 16)), L.SimpleRNN(32), L.Dense(10)])
    found = memory.tower_memory(traced(model, num_towers=1).phases(), 64)
    kept = 4 * 64 * 50 * (16 + 32)
    assert kept <= found.activations() < 1.4 * kept


def test_activations_grow_with_the_rows_and_gradients_do_not():
    phases = traced(convolutions(norm=True), num_towers=1).phases()
    small, large = (memory.tower_memory(phases, rows) for rows in (8, 64))
    assert small.gradients == large.gradients
    for counts in ((), (2,), (3, 2)):
        expected = 8 * small.activations(*counts)
        assert large.activations(*counts) == pytest.approx(expected, rel=0.01)
        assert small.with_rows(64).activations(*counts) == pytest.approx(expected, rel=0.01)


def test_towers_that_meet_keep_what_all_of_a_device_have():
    options = {"num_towers": 4, "devices": tower_devices(2, "cpu"), "policy": GPU}
    together, alone = (
        memory.device_memory(traced(convolutions(norm=True), batch_norm=how, **options), 64)
        for how in ("synchronized", "average")
    )
    for device in ("/cpu:0", "/cpu:1"):
        assert together[device].activations > 1.5 * alone[device].activations
    assert (alone["/cpu:0"].slots > 0, alone["/cpu:1"].slots) == (True, 0)


def test_the_largest_number_of_rows_just_fits_a_simulated_limit(monkeypatch):
    limit = 64 * 2**20
    monkeypatch.setattr(memory, "memory_limit", lambda device: limit)
    step = traced(convolutions(), num_towers=1, policy=GPU)
    most = memory.device_memory(step, 8)["/cpu:0"].most_rows
    sums = [memory.device_memory(step, rows)["/cpu:0"].total for rows in (most, most + 2)]
    assert sums[0] <= 0.9 * limit < sums[1]
    (line,) = memory.memory_table(memory.device_memory(step, 8))[1:]
    assert line.split()[-1] == f"{most:,}"


def test_the_estimate_is_within_a_quarter_of_a_process():
    environment = {**os.environ, **MALLOC, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert float(done.stdout) == pytest.approx(1, abs=0.25)
