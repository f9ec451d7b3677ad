"""Towers in stages: the bits of whole towers, and a full pipeline."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import towers
from tests.step.sleeping_stages import share_waited
from tests.step.stage_models import MODELS, bits
from towers.machine.devices import CPU, GPU
from towers.step.stages import one_forward_one_backward

L = keras.layers
POLICIES = {"cpu": CPU, "gpu": GPU}


@pytest.mark.telling("gpu-3-nested")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_stages_change_no_bit(policy, count, name):
    """Of 4 towers in 2 groups, beside whole towers; partial batches, and one of 3 examples."""
    build, batch = MODELS[name]

    def make(gpus_per_tower):
        return towers.TowerStep(
            build(), keras.optimizers.Adam(0.01), "mse", num_towers=4, nonfinite="skip",
            gpus_per_tower=gpus_per_tower, policy=POLICIES[policy],
            devices=[f"/cpu:{i}" for i in range(2 * gpus_per_tower)],
        )

    assert bits(lambda: make(count), batch) == bits(lambda: make(1), batch)


@pytest.mark.parametrize("num_towers", [1, 2, 5])
def test_a_stage_holds_no_more_towers_than_are_ahead_of_it(num_towers):
    for num_stages in range(2, 5):
        for stage in range(num_stages):
            pieces = one_forward_one_backward(stage, num_stages, num_towers)
            levels = {stage, 2 * (num_stages - 1) - stage}
            assert sorted(pieces) == [(t, n) for t in range(num_towers) for n in sorted(levels)]
            held = [sum(1 if level == stage else -1 for _, level in pieces[: i + 1])
                    for i in range(len(pieces))]
            if len(levels) == 2:
                assert max(held) == min(num_towers, num_stages - stage) and held[-1] == 0


@pytest.mark.telling("2-4")
@pytest.mark.parametrize("num_towers", [4, 8, 16])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_the_pipeline_is_full(num_stages, num_towers):
    """Devices wait at the pipeline's two ends alone, (S-1) / (M+S-1) of the time.

    TensorFlow here has as many threads as cores: more stages than these sleep in another process.
    """
    if num_stages == 2:
        found = share_waited(num_stages, num_towers)
    else:
        command = [sys.executable, "-m", "tests.step.sleeping_stages", f"{num_stages}",
                   f"{num_towers}"]
        found = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    expected = (num_stages - 1) / (num_towers + num_stages - 1)
    assert expected - 0.01 < found < expected + 0.05


def test_a_device_computes_its_own_stage_alone():
    """One trace, whatever the number of groups; every call of it on its stage's device."""
    model = keras.Sequential([keras.Input((4,)), L.Dense(5), L.Dense(6), L.Dense(7)])
    step = towers.TowerStep(model, "sgd", "mse", policy=GPU,
                            devices=[f"/cpu:{i}" for i in range(6)], gpus_per_tower=3, num_towers=4)
    step.train_batch(np.ones([8, 4]), np.ones([8, 7]))
    calls = {}
    for node in step.traces[-1].graph.as_graph_def().node:
        if node.name.startswith("tower_") and "PartitionedCall" in node.op:
            calls.setdefault(node.attr["f"].func.name, []).append(node.device[-5:])
    places = sorted(sorted(devices) for devices in calls.values())
    first, second, third = (["CPU:0", "CPU:3"], ["CPU:1", "CPU:4"], ["CPU:2", "CPU:5"])
    assert places == sorted(sorted(2 * each) for each in (first, first, second, second, third))
