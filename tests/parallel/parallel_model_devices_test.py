"""The devices of make_parallel: where towers and variables are; machine/gpus_test has `gpus`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.parallel.pairs import classifier


@pytest.mark.parametrize("num_towers", [0, -2, 1.5, "4"])
def test_other_tower_counts_are_errors(num_towers):
    with pytest.raises(ValueError, match="num_towers.*at least 1"):
        towers.make_parallel(classifier(), 2, num_towers=num_towers)


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
