"""The devices of make_parallel: where towers and variables are; machine/gpus_test has `gpus`."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.parallel.pairs import classifier
from tests.processes import ROOT
from towers.parallel import parallel_model


@pytest.mark.parametrize("gpus, expected", [(3, [0, 1, 2]), ([5, 1], [5, 1])])
def test_towers_run_on_the_devices_asked_for(gpus, expected, monkeypatch):
    """On a machine without GPUs: logical CPU devices."""
    monkeypatch.setattr(parallel_model, "parallel_on", lambda model, *where, **options: where[:2])
    devices = [f"/cpu:{i}" for i in expected]
    assert towers.make_parallel(classifier(), gpus) == (devices, len(devices))


@pytest.mark.parametrize("num_towers", [0, -2, 1.5, "4"])
def test_other_tower_counts_are_errors(num_towers):
    with pytest.raises(ValueError, match="num_towers.*at least 1"):
        towers.make_parallel(classifier(), 2, num_towers=num_towers)


FRESH = """
import sys
import tensorflow as tf
import towers
import keras
model = keras.Sequential([keras.layers.Dense(3)])
if sys.argv[1] == "started":
    model.build((None, 2))
elif sys.argv[1] == "more":
    towers.logical_cpus(4)
parallel = towers.make_parallel(model, *map(int, sys.argv[2:]))
print(len(tf.config.list_logical_devices("CPU")), parallel)
"""


@pytest.mark.parametrize(
    "when, count, where",
    [
        ("fresh", "3", "3 3 towers on /cpu:0, /cpu:1, /cpu:2"),
        ("more", "", "4 4 towers on /cpu:0, /cpu:1, /cpu:2, /cpu:3"),
        ("started", "3", "1 3 towers on /cpu:0"),
    ],
)
def test_logical_cpus_are_made_as_long_as_tensorflow_has_not_started(when, count, where):
    """After that all towers share the CPU, which is said; the repr says where they are."""
    run = processes.run("-c", FRESH, when, *count, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    shown = r"<parallel <Sequential name=sequential, built=(True|False)>: "
    assert re.sub(shown, "", run.stdout.strip()) == f"{where}>"
    said = "all 3 towers share /cpu:0", "call towers.logical_cpus("
    assert [words in run.stderr for words in said] == [when == "started"] * 2


def test_without_gpus_named_towers_run_on_all_devices():
    assert "4 towers on /cpu:0, /cpu:1, " in repr(towers.make_parallel(classifier(), num_towers=4))
    assert ": 8 towers on /cpu:0, " in repr(towers.make_parallel(classifier()))


def test_towers_run_on_their_devices_and_variables_are_made_on_the_cpu():
    """Read from the graph of one training step."""
    with tf.device("/cpu:3"):  # a default device, as /gpu:0 is one
        parallel = towers.make_parallel(keras.Sequential([keras.layers.Dense(3)]), [1, 2, 6])
        parallel.compile("adam", "mse", metrics=["mae"])
        x = np.ones((7, 6), "float32")
        parallel.fit(x, x[:, :3], verbose=0)
        step = tf.function(parallel.train_step, autograph=False)
        graph = step.get_concrete_function((tf.constant(x), tf.constant(x[:, :3]))).graph
    calls = [
        op
        for op in graph.get_operations()
        if "PartitionedCall" in op.type and "_tower_" in op.get_attr("f").name
    ]
    assert [op.device[-5:] for op in calls] == ["CPU:1", "CPU:2", "CPU:6"]
    made = [*parallel.variables, *parallel.optimizer.variables, *parallel.metrics_variables]
    for variable in made:
        assert variable.value.device.endswith("CPU:0"), variable.path
