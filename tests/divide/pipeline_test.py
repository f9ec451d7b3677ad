"""Stages of divided towers: where operations run, and what meets between pieces."""

import re
from collections import defaultdict

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.step.stage_models import MODELS, bits, row_batch
from towers.divide.tower_step import TowerStep
from towers.machine.devices import CPU, GPU, REHEARSAL

L = keras.layers
# Sizes are computed wherever they are read, and a loop reads lists that its gradient made.
WORK = re.compile("Conv|.*MatMul|BiasAdd|MaxPool|.*While|Tanh|Einsum")


def make_step(model, gpus_per_tower, **options):
    """Returns a step of 4 towers in 2 groups."""
    options = {"policy": GPU, **options}
    return TowerStep(
        model, "adam", "mse", num_towers=4, gpus_per_tower=gpus_per_tower, jit_compile=False,
        devices=[f"/cpu:{i}" for i in range(2 * gpus_per_tower)], **options,
    )  # fmt: skip


def names_by_stage(step, num_stages):
    """Returns the (name, type) of the operations that towers run, by the stage of their device."""
    graph = step.traces[-1].graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    found = defaultdict(set)
    for node in graph.node:
        if node.name.startswith("tower_") and "PartitionedCall" in node.op:
            stage = int(node.device.rpartition(":")[2]) % num_stages
            nodes = functions[node.attr["f"].func.name].node_def
            found[stage] |= {(each.name, each.op) for each in nodes}
    return found


@pytest.mark.telling("loops")
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_runs_on_the_device_of_its_stage_and_the_loss_on_the_last_one(name):
    build, batch = MODELS[name]
    step = make_step(build(), 3)
    step(*batch(8, np.random.default_rng(0)))
    found = names_by_stage(step, 3)
    assert sorted(found) == [0, 1, 2]
    for stage, operations in found.items():
        work = [name for name, kind in operations if WORK.match(kind)]
        named = [int(scope) for name in work for scope in re.findall(r"stage_(\d)", name)]
        assert set(named) <= {stage}
        has_loss = any("compile_loss" in name and kind == "Square" for name, kind in operations)
        assert has_loss == (stage == 2)


def test_a_pool_is_computed_again_beside_its_gradient():
    build, batch = MODELS["pools"]
    step = make_step(build(), 3)
    step(*batch(8, np.random.default_rng(0)))
    for function in step.traces[-1].graph.as_graph_def().library.function:
        kinds = {node.op for node in function.node_def}
        assert "MaxPoolGrad" not in kinds or "MaxPool" in kinds


def statistics():
    """Statistics of all rows in the first and in the last stage."""
    x = keras.Input((6,))
    y = L.BatchNormalization(synchronized=True)(L.Dense(5)(x))
    return keras.Model(x, L.Dense(3)(L.BatchNormalization()(L.Dense(4, "relu")(y))))


@pytest.mark.telling("synchronized")
@pytest.mark.parametrize("batch_norm", ["synchronized", "average", "tower0"])
def test_statistics_of_all_towers_go_with_stages(batch_norm):
    def make(gpus_per_tower):
        return make_step(statistics(), gpus_per_tower, batch_norm=batch_norm)

    assert bits(lambda: make(2), row_batch) == bits(lambda: make(1), row_batch)


@pytest.mark.telling("GPU")
@pytest.mark.parametrize("policy", [CPU, GPU], ids=["CPU", "GPU"])
def test_placed_shards_noise_scale_and_gradients_have_the_bits_of_whole_towers(policy):
    def found(gpus_per_tower):
        keras.utils.set_random_seed(1)
        step = make_step(MODELS["shared"][0](), gpus_per_tower, policy=policy, noise_scale=True)
        rng = np.random.default_rng(0)
        batches = [row_batch(n, rng) for n in (9, 5)]
        values = [
            step.train_batch(**batch._asdict())
            for batch in towers.prefetched(step, batches, to_devices=True)
        ]
        values.append(step.gradients(*batches[0]))
        values.append(step.predict_batch(batches[0][0]))
        values += [variable.value for variable in step.model.variables]
        return b"".join(np.asarray(v).tobytes() for v in tf.nest.flatten(values))

    assert found(3) == found(1)


class OwnStep(keras.Model):
    """A custom train_step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def custom():
    x = keras.Input((6,))
    return OwnStep(x, L.Dense(3)(L.Dropout(0.2)(L.Dense(5, activation="gelu")(x))))


def unbuilt():
    return keras.Sequential([L.Dense(5, activation="gelu"), L.BatchNormalization(), L.Dense(3)])


@pytest.mark.telling("unbuilt-True")
@pytest.mark.parametrize("rehearses_gpus", [False, True])
@pytest.mark.parametrize("build", [custom, unbuilt])
def test_fit_in_stages_gives_the_bits_of_whole_towers(build, rehearses_gpus, monkeypatch):
    monkeypatch.setenv(REHEARSAL, str(int(rehearses_gpus)))  # GPUs get shards ahead of the step

    def found(gpus_per_tower):
        keras.utils.set_random_seed(1)
        model = towers.make_parallel(
            build(), gpus=2 * gpus_per_tower, num_towers=4, gpus_per_tower=gpus_per_tower
        )
        model.compile("adam", "mse", jit_compile=False)
        x, y = row_batch(21, np.random.default_rng(0))
        losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
        values = [losses, model.predict(x, batch_size=8, verbose=0), *model.get_weights()]
        return b"".join(np.asarray(v).tobytes() for v in values)

    assert found(2) == found(1)
