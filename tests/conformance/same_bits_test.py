"""A run is defined by its number of towers; devices only decide where a tower is computed."""

import hashlib

import keras
import numpy as np
import pytest

from tests.conformance.cases import BUILDERS, NOISE, ODD, Noise, fan_out, noisy, rows
from towers.app import models
from towers.machine import devices
from towers.machine.policy import GPU
from towers.step import TowerStep

SHAPE, CLASSES = (12, 12, 1), 10
BATCHES = [24, 13, 5]  # a partial last batch, and one smaller than the tower count
WITHOUT_STAGES = ("ignore_class", "ragged_output", "subclassed")  # of one layer, of no graph
DEVICES = {"cnn": (1, 2, 3, 4, 8)}  # the others: one tower a device, and an uneven share of them


def train(build, batches, num_towers, num_devices, **options):
    """The digest of all variables and logs after one update for each batch."""
    keras.utils.set_random_seed(3)
    model = build()
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=options.pop("global_clipnorm", None))
    step = TowerStep(
        model, optimizer, num_towers=num_towers,
        devices=devices.tower_devices(num_devices, "cpu"), **options,
    )
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(np.float64(step(*batch)["loss"]).tobytes())
    for variable in [*model.variables, *step.optimizer.variables]:
        digest.update(variable.numpy().tobytes())
    return digest.hexdigest()


def image_batches():
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(n, *SHAPE)).astype("float32"), rng.integers(0, CLASSES, n))
        for n in BATCHES
    ]


@pytest.mark.telling("cnn")
@pytest.mark.parametrize("name", BUILDERS)
def test_eight_towers_give_the_same_bits_on_any_number_of_devices(name):
    """Adam, dropout, BatchNormalization and a partial last batch."""
    digests = {
        train(lambda: BUILDERS[name](SHAPE, CLASSES), image_batches(), 8, num_devices,
              loss="sparse_categorical_crossentropy")
        for num_devices in DEVICES.get(name, (3, 8))
    }
    assert len(digests) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("num_towers", [3, 6])
def test_odd_tower_counts_give_the_same_bits_on_any_number_of_devices(num_towers):
    digests = {
        train(lambda: models.load("notebook_cnn").build(SHAPE, CLASSES), image_batches(),
              num_towers, num_devices, loss="sparse_categorical_crossentropy",
              global_clipnorm=0.1)
        for num_devices in (1, 2, 3)
    }
    assert len(digests) == 1


@pytest.mark.telling("embedding", "two_outputs_dict")
@pytest.mark.parametrize("case", [c for c in ODD if c.name != "ignore_class"], ids=str)
def test_odd_models_give_the_same_bits_on_any_number_of_devices(case, float64):
    rng = np.random.default_rng(0)
    batches = [case.batch(n, rng) for n in (9, 4)]
    digests = {train(case.build, batches, 5, n, **case.compile) for n in (2, 5)}
    assert len(digests) == 1


@pytest.mark.telling("fan_out")
@pytest.mark.parametrize("case", [c for c in ODD if c.name not in WITHOUT_STAGES], ids=str)
def test_odd_models_give_the_same_bits_in_stages(case, float64):
    rng = np.random.default_rng(0)
    batches = [case.batch(n, rng) for n in (9, 4)]
    digests = {
        train(case.build, batches, 4, 2 * n, gpus_per_tower=n, policy=GPU, **case.compile)
        for n in (1, 2)
    }
    assert len(digests) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_built_in_models_give_the_same_bits_in_stages(name, count):
    digests = {
        train(lambda: BUILDERS[name](SHAPE, CLASSES), image_batches(), 4, 2 * n, gpus_per_tower=n,
              policy=GPU, loss="sparse_categorical_crossentropy")
        for n in (1, count)
    }
    assert len(digests) == 1


@pytest.mark.telling("in_branch")
@pytest.mark.parametrize("name", NOISE)
def test_noise_of_tf_random_is_the_same_bits_on_any_number_of_devices(name):
    batches = [rows(n, np.random.default_rng(n)) for n in (9, 4)]
    digests = {
        train(lambda: noisy(name), batches, 4, n, loss="mse") for n in (1, 2, 4)
    }
    assert len(digests) == 1


@pytest.mark.parametrize("name", NOISE)
def test_towers_draw_other_noise_by_tf_random(name):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), Noise(NOISE[name])])
    step = TowerStep(
        model, "sgd", "mse", num_towers=4, devices=devices.tower_devices(2, "cpu")
    )
    for size in (8, 3):
        assert len(np.unique(step.predict_batch(np.zeros((size, 6), "float32")))) == 6 * size


def test_the_tower_count_does_change_the_bits():
    """Otherwise the tests above could not fail."""
    batches = [rows(40, np.random.default_rng(0))]
    digests = {train(fan_out, batches, n, 2, loss="mse") for n in (2, 8)}
    assert len(digests) == 2
