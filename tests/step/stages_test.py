"""Towers in stages: which layer is in which, the bits of whole towers, and a full pipeline.

`python -m tests.step.stages_test S M`: whether S devices have work in each slot, of M towers.
"""

import collections
import dataclasses
import itertools
import sys
import threading
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.step.small_step import called_in_towers
from tests.step.stage_models import MODELS, bits
from towers.machine.devices import GPU
from towers.step.stages import Stages, balanced, one_forward_one_backward

L = keras.layers


def chain(*units):
    return keras.Sequential(
        [keras.Input((4,)), *(L.Dense(n, name=f"dense_{i}") for i, n in enumerate(units))]
    )


def devices(count):
    return [f"/cpu:{i}" for i in range(count)]


def test_the_largest_part_is_as_small_as_can_be():
    """Beside all ways to cut."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(0, 9, rng.integers(1, 8)).tolist()
        count = int(rng.integers(1, len(sizes) + 1))

        def largest(begins, sizes=sizes):
            return max(sum(sizes[i:j]) for i, j in itertools.pairwise([*begins, len(sizes)]))

        found = balanced(sizes, count)
        assert found[0] == 0 and len(set(found)) == count and found == sorted(found)
        ways = itertools.combinations(range(1, len(sizes)), count - 1)
        assert largest(found) == min(largest([0, *way]) for way in ways)


def test_stages_begin_at_the_layers_that_are_named():
    model = chain(4, 4, 4, 4)
    stages = Stages(model, devices(6), 3, ["dense_1", "dense_3"])
    assert stages.names == [["dense_0"], ["dense_1", "dense_2"], ["dense_3"]]
    assert stages.of(model.trainable_variables) == [0, 0, 1, 1, 1, 1, 2, 2]
    assert stages.of([tf.Variable(0.0)]) == [2]
    assert stages.groups == {"/cpu:0": devices(3), "/cpu:3": ["/cpu:3", "/cpu:4", "/cpu:5"]}


@pytest.mark.parametrize(
    "names, error",
    [
        (["dense_1"], "must name 2 layers.*gpus_per_tower=2"),
        (["dense_1", "dens_3"], "(dens_3).*no such layer; nearest are dense_3"),
        (["dense_3", "dense_1"], "(dense_1).*not come after 'dense_3'"),
        (["dense_0", "dense_1"], "(dense_0).*not come after 'dense_0'"),
    ],
)
def test_wrong_names_of_stages_are_errors(names, error):
    with pytest.raises(ValueError, match=error):
        towers.TowerStep(
            chain(4, 4, 4, 4), "sgd", "mse", devices=devices(3), gpus_per_tower=3, stages=names
        )


class OwnCall(keras.Model):
    """A model without a graph."""

    def call(self, x):
        return x


@pytest.mark.parametrize(
    "options, error",
    [
        ({"gpus_per_tower": 0}, "at least 1"),
        ({"gpus_per_tower": 3}, "must divide the number of devices, which is 4: use 3"),
        ({"stages": "dense_1"}, "a list of layers' names"),
    ],
)
def test_options_that_contradict_each_other_are_errors(options, error):
    """By TowerStep and by make_parallel alike."""
    options = {"gpus_per_tower": 2, **options}
    with pytest.raises(ValueError, match=error):
        towers.TowerStep(chain(4, 4), "sgd", "mse", devices=devices(4), **options)
    with pytest.raises(ValueError, match=error):
        towers.make_parallel(chain(4, 4), 4, **options)


@pytest.mark.parametrize(
    "model, error",
    [
        (lambda: chain(4), "more than the 1 layers"),
        (OwnCall, "has a custom `call`.*gpus_per_tower=1"),
    ],
)
def test_models_without_stages_are_errors(model, error):
    model = model()
    model.build((None, 4))
    with pytest.raises(ValueError, match=error):
        towers.TowerStep(model, "sgd", "mse", devices=devices(4), gpus_per_tower=2)


def test_xla_does_not_compile_stages():
    model, options = chain(4, 4), {"devices": devices(2), "gpus_per_tower": 2}
    with pytest.raises(ValueError, match="does not go with"):
        towers.TowerStep(model, "sgd", "mse", **options, jit_compile=True)
    model.compile("sgd", "mse", jit_compile=True)
    assert not towers.TowerStep(model, "sgd", "mse", **options).uses_xla


def test_a_warning_says_that_xla_compiles_a_model_only_without_stages():
    def uses_xla(**options):
        model = keras.Sequential([keras.Input((5, 3)), L.GRU(4), L.Dense(2)])
        return towers.TowerStep(model, "sgd", "mse", devices=devices(2), **options).uses_xla

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert uses_xla() and not uses_xla(jit_compile=False, gpus_per_tower=2)
    with pytest.warns(UserWarning, match="XLA compiles this model only without stages"):
        assert not uses_xla(gpus_per_tower=2)


def test_a_device_computes_its_own_stage_and_adds_its_gradients():
    """The graph: one trace, whatever the number of groups; calls and additions by their device."""
    step = towers.TowerStep(
        chain(5, 6, 7),
        "sgd",
        "mse",
        devices=devices(6),
        gpus_per_tower=3,
        num_towers=4,
        policy=dataclasses.replace(GPU, pack_transfers=False),
    )
    step.train_batch(np.ones([8, 4]), np.ones([8, 7]))
    calls, additions = {}, collections.Counter()
    for node in step.traces[-1].graph.as_graph_def().node:
        if node.name.startswith("tower_") and "PartitionedCall" in node.op:
            calls.setdefault(node.attr["f"].func.name, []).append(node.device[-5:])
        elif node.name.startswith("sum") and node.op == "AddV2":
            additions[node.device[-5:]] += 1
    first, second, third = (["CPU:0", "CPU:3"], ["CPU:1", "CPU:4"], ["CPU:2", "CPU:5"])
    places = sorted(sorted(devices) for devices in calls.values())
    assert places == sorted(sorted(2 * each) for each in (first, first, second, second, third))
    # ((0 1) (2 3)): three additions of each stage's two gradients. The last stage also adds the
    # loss, and the loss for its running mean.
    assert additions == {
        "CPU:0": 2 * 2,
        "CPU:3": 2,
        "CPU:1": 2 * 2,
        "CPU:4": 2,
        "CPU:2": 4 * 2,
        "CPU:5": 4,
    }


class Slots:
    """The slots of a full pipeline. A call ends when all calls of its slot have begun.

    slot:    0  1  2  3  4  5        M = 2 towers, S = 2 stages, forward and backward
    stage 0  F0 F1    B0    B1
    stage 1     F0 B0 F1 B1          one call of a tower makes both
    """

    def __init__(self, num_stages, num_towers):
        self.slots = [[] for _ in range(num_stages)]  # of each stage, in the order of its calls
        ends = {(t, -1): 0 for t in range(num_towers)}
        queues = [one_forward_one_backward(s, num_stages, num_towers) for s in range(num_stages)]
        while any(queues):
            for slots, queue in zip(self.slots, queues, strict=True):
                while queue and (queue[0][0], queue[0][1] - 1) in ends:
                    tower, level = queue.pop(0)
                    begin = max(ends[tower, level - 1], slots[-1] + 1 if slots else 0)
                    slots += range(begin, begin + (2 if level == num_stages - 1 else 1))
                    ends[tower, level] = slots[-1] + 1
        self.count = max(ends.values())
        sizes = collections.Counter(slot for slots in self.slots for slot in slots)
        self._barriers = {slot: threading.Barrier(size) for slot, size in sizes.items()}
        self._ahead = [iter(slots) for slots in self.slots]

    def call(self, x):
        """Waits for the others of the slot; each stage has its own number of features."""
        self._barriers[next(self._ahead[x.shape[1] - 1])].wait(timeout=60)
        return x


class Calls(L.Layer):
    def call(self, x):
        @tf.custom_gradient
        def called(x):
            return tf.raw_ops.Snapshot(input=x), lambda dy: tf.raw_ops.Snapshot(input=dy)

        return called(x)


def fill_pipeline(num_stages, num_towers):
    """Makes a step whose devices work in each slot; BrokenBarrierError if one of them waits."""
    layers = [layer for n in range(num_stages) for layer in (L.Dense(n + 1), Calls())]
    model = keras.Sequential([keras.Input((1,)), *layers])
    step = towers.TowerStep(
        model,
        "sgd",
        "mse",
        policy=GPU,
        num_towers=num_towers,
        gpus_per_tower=num_stages,
        devices=devices(num_stages),
        stages=[layer.name for layer in layers[2::2]],
    )
    slots = Slots(num_stages, num_towers)
    assert slots.count == 2 * (num_towers + num_stages - 1)
    assert all(len(own) == 2 * num_towers for own in slots.slots)
    with called_in_towers(slots.call):
        step.train_batch(np.ones([num_towers, 1]), np.ones([num_towers, num_stages]))


@pytest.mark.telling("shared")
@pytest.mark.parametrize("name", MODELS)
def test_stages_change_no_bit(name):
    """Of 4 towers in 2 groups, beside whole towers; partial batches, and one of 3 examples."""
    build, batch = MODELS[name]

    def make(gpus_per_tower):
        return towers.TowerStep(
            build(),
            keras.optimizers.Adam(0.01),
            "mse",
            num_towers=4,
            nonfinite="skip",
            gpus_per_tower=gpus_per_tower,
            policy=GPU,
            jit_compile=False,
            devices=[f"/cpu:{i}" for i in range(2 * gpus_per_tower)],
        )

    assert bits(lambda: make(3), batch) == bits(lambda: make(1), batch)


@pytest.mark.parametrize("num_towers", [1, 2, 5])
def test_a_stage_holds_no_more_towers_than_are_ahead_of_it(num_towers):
    for num_stages in range(2, 5):
        for stage in range(num_stages):
            pieces = one_forward_one_backward(stage, num_stages, num_towers)
            levels = {stage, 2 * (num_stages - 1) - stage}
            assert sorted(pieces) == [(t, n) for t in range(num_towers) for n in sorted(levels)]
            held = [
                sum(1 if level == stage else -1 for _, level in pieces[: i + 1])
                for i in range(len(pieces))
            ]
            if len(levels) == 2:
                assert max(held) == min(num_towers, num_stages - stage) and held[-1] == 0


@pytest.mark.telling("2-4")
@pytest.mark.parametrize("num_stages, num_towers", [(2, 4), (4, 8)])
def test_the_pipeline_is_full(num_stages, num_towers):
    """Devices wait at the pipeline's two ends alone, (S-1) / (M+S-1) of the time.

    TensorFlow here has as many threads as cores: more stages than these meet in another process.
    """
    if num_stages == 2:
        fill_pipeline(num_stages, num_towers)
    else:
        ended = processes.run("-m", "tests.step.stages_test", num_stages, num_towers)
        assert ended.returncode == 0, ended.stderr


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(16)
    stages, count = map(int, sys.argv[1:])
    towers.logical_cpus(stages, set_threads=False)
    fill_pipeline(stages, count)
