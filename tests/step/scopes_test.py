"""The scopes of a step's graph."""

import keras
import numpy as np

from towers.machine import policy
from towers.step import TowerStep, scopes


def test_a_step_writes_its_scopes_and_calls_nothing_outside_of_them():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    step = TowerStep(
        model, "adam", "mse", devices=["/cpu:0", "/cpu:1"], num_towers=4, policy=policy.GPU
    )
    step(np.ones((5, 4), "float32"), np.ones((5, 2), "float32"))
    nodes = step.update_graph().node
    towers = {scopes.tower(t) for t in range(4)}
    outermost = {node.name.partition("/")[0] for node in nodes if "/" in node.name}
    assert {*towers, "split", "parameters", "weights", "sum", "update"} <= outermost
    calls = {node.name.partition("/")[0] for node in nodes if "PartitionedCall" in node.op}
    assert calls == {*towers, "update"}
