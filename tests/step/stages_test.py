"""Which stage each layer is in, and which stages are refused."""

import collections
import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.machine.devices import GPU
from towers.step.stages import Stages, balanced, check_stages

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


@pytest.mark.parametrize(("names", "error"), [
    (["dense_1"], "must name 2 layers.*gpus_per_tower=2"),
    (["dense_1", "dens_3"], "(dens_3).*no such layer; nearest are dense_3"),
    (["dense_3", "dense_1"], "(dense_1).*not come after 'dense_3'"),
    (["dense_0", "dense_1"], "(dense_0).*not come after 'dense_0'"),
])
def test_names_that_make_no_sense_are_refused(names, error):
    with pytest.raises(ValueError, match=error):
        towers.TowerStep(chain(4, 4, 4, 4), "sgd", "mse", devices=devices(3), gpus_per_tower=3,
                         stages=names)


class OwnCall(keras.Model):
    """A model without a graph."""

    def call(self, x):
        return x


@pytest.mark.parametrize(("options", "error"), [
    ({"gpus_per_tower": 0}, "at least 1"),
    ({"gpus_per_tower": True}, "an integer of at least 1"),
    ({"gpus_per_tower": 3}, "must divide the number of devices, which is 4: use 3"),
    ({"gpus_per_tower": 1, "stages": ["dense_1"]}, "gpus_per_tower=2"),
    ({"stages": "dense_1"}, "a list of layers' names"),
    ({"stages": [1]}, "a list of layers' names"),
    ({"strategy": "mirrored"}, "does not go with strategy=mirrored"),
    ({"batch_norm": "synchronized"}, "does not go with batch_norm=synchronized"),
])
def test_options_that_contradict_each_other_are_refused(options, error):
    """By TowerStep and by make_parallel alike."""
    options = {"gpus_per_tower": 2, **options}
    with pytest.raises(ValueError, match=error):
        towers.TowerStep(chain(4, 4), "sgd", "mse", devices=devices(4), **options)
    with pytest.raises(ValueError, match=error):
        towers.make_parallel(chain(4, 4), 4, **options)


@pytest.mark.parametrize(("model", "error"), [
    (lambda: chain(4), "more than the 1 layers"),
    (OwnCall, "has a custom `call`.*gpus_per_tower=1"),
    (lambda: keras.Sequential([keras.Input((4,)), L.Dense(4),
                               L.BatchNormalization(synchronized=True)]), "synchronized=True"),
])
def test_models_without_stages_are_refused(model, error):
    model = model()
    model.build((None, 4))
    with pytest.raises(ValueError, match=error):
        towers.TowerStep(model, "sgd", "mse", devices=devices(4), gpus_per_tower=2)


def test_xla_does_not_compile_stages_nor_are_there_copies():
    for refused in ({"jit_compile": True}, {"strategy": "auto"}):  # the latter is train.py's
        with pytest.raises(ValueError, match="does not go with"):
            check_stages(2, None, **refused)
    model = chain(4, 4)
    model.compile("sgd", "mse", jit_compile=True)
    assert not towers.TowerStep(model, "sgd", "mse", devices=devices(2), gpus_per_tower=2).uses_xla


def test_each_device_receives_and_adds_its_own_stages_parameters_alone():
    """The graph: of each variable's gradient, the additions are on its stage's device."""
    step = towers.TowerStep(
        chain(5, 6, 7), "sgd", "mse", devices=devices(4), gpus_per_tower=2, num_towers=4,
        policy=dataclasses.replace(GPU, pack_transfers=False), stages=["dense_1"],
    )
    step.train_batch(np.ones([8, 4]), np.ones([8, 7]))
    graph = step.traces[-1].graph.as_graph_def()
    nodes = [n for n in graph.node if n.op == "AddV2" and n.name.startswith("sum")]
    counts = collections.Counter(node.device.rpartition("/device:")[2] for node in nodes)
    # ((0 1) (2 3)): of dense_0's two gradients three additions; of the loss and the other four
    assert counts == {"CPU:0": 2 * 2, "CPU:2": 2, "CPU:1": 5 * 2, "CPU:3": 5}
