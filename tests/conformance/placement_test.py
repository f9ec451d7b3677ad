"""Variables, towers and the update are where the diagram says, read from the traced graph."""

import re

import keras
import numpy as np
import pytest

from tests.step.small_step import partition_graphs
from towers.machine import devices
from towers.step import TowerStep

L = keras.layers


def trained_step(num_towers, num_devices):
    model = keras.Sequential([
        keras.Input((8, 8, 1)), L.Conv2D(4, 3), L.BatchNormalization(), L.Flatten(), L.Dense(2)
    ])
    step = TowerStep(model, "adam", "mse", devices=devices.tower_devices(num_devices, "cpu"),
                     num_towers=num_towers)
    step(np.ones((9, 8, 8, 1), "float32"), np.ones((9, 2), "float32"))
    return step


def cpu_index(operation):
    return int(re.search(r"CPU:(\d+)", operation.device).group(1))


@pytest.mark.parametrize("num_towers, num_devices", [(8, 4), (3, 2)])
def test_tower_t_runs_on_device_t_times_D_over_T_and_the_update_on_cpu_0(num_towers, num_devices):
    step = trained_step(num_towers, num_devices)
    (graph,) = step.traces
    calls = [op for op in graph.graph.get_operations() if "PartitionedCall" in op.type]
    towers = [cpu_index(op) for op in calls if "train" in op.get_attr("f").name]
    assert towers == [t * num_devices // num_towers for t in range(num_towers)]
    assert [cpu_index(op) for op in calls if "update_program" in op.get_attr("f").name] == [0]
    for variable in [*step.model.variables, *step.optimizer.variables]:
        assert variable.value.device.endswith("CPU:0"), variable.path


def test_parameters_are_sent_once_to_each_device_not_once_to_each_tower():
    steps = []
    graphs = partition_graphs(lambda: steps.append(trained_step(8, 2)))
    step, partitions = steps[0], [g for g in graphs if any("CPU:1" in n.device for n in g.node)]
    received = [n.attr["tensor_name"].s.decode() for graph in partitions for n in graph.node
                if n.op == "_Recv" and b"parameters/" in n.attr["tensor_name"].s]
    assert received
    assert len(received) == len(set(received))
    assert len(received) <= len(step.model.variables) + len(step.optimizer.variables)
