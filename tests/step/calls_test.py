"""Towers called on their devices."""

import pytest
import tensorflow as tf

from towers.machine import devices as devices_lib
from towers.step.calls import call_on_devices


@tf.function(autograph=False)
def multiplied(held, x, factor):
    return factor * held[0] * x


@pytest.mark.parametrize("take_turns", [False, True])
def test_each_tower_is_called_on_its_device_with_its_arguments(take_turns):
    devices = devices_lib.place_towers(5, ["/cpu:1", "/cpu:2"])
    graph_devices = []

    @tf.function(autograph=False)
    def run_all(parameter):
        number = tf.TensorSpec([])
        function = multiplied.get_concrete_function([number], number, number)
        others = [(tf.constant(float(t)), tf.constant(2.0)) for t in range(5)]
        results = call_on_devices(
            function, [[parameter]] * 5, others, devices, take_turns=take_turns
        )
        calls = [op for op in tf.compat.v1.get_default_graph().get_operations()
                 if "PartitionedCall" in op.type]
        graph_devices.extend((op.name.split("/")[0], op.device[-5:]) for op in calls)
        return results

    losses = run_all(tf.constant(3.0))
    assert [float(loss) for loss in losses] == [0, 6, 12, 18, 24]
    assert graph_devices == [("tower_0", "CPU:1"), ("tower_1", "CPU:1"), ("tower_2", "CPU:1"),
                             ("tower_3", "CPU:2"), ("tower_4", "CPU:2")]
