"""A run is defined by its number of towers; devices only decide where a tower is computed."""

import hashlib

import keras
import numpy as np
import pytest

from tests.bits import bits
from tests.conformance.cases import BUILDERS, NOISE, Noise, ODD, fan_out, noisy, rows
from towers.machine import devices
from towers.machine.devices import GPU
from towers.divide.tower_step import TowerStep

SHAPE, CLASSES = (12, 12, 1), 10
BATCHES = [24, 13, 5]  # a partial last batch, and one smaller than the tower count
WITHOUT_STAGES = ("ignore_class", "ragged_output", "subclassed")  # of one layer, of no graph
DEVICES = {"cnn": (1, 3)}  # the others: 3, an uneven share of the towers, and one each


def train(build, batches, num_towers, num_devices, **options):
    """The digest of all variables and logs after one update for each batch."""
    keras.utils.set_random_seed(3)
    model = build()
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=options.pop("global_clipnorm", None))
    step = TowerStep(
        model,
        optimizer,
        num_towers=num_towers,
        devices=devices.tower_devices(num_devices, "cpu"),
        **options,
    )
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(bits(np.float64(step(*batch)["loss"])))
    for variable in [*model.variables, *step.optimizer.variables]:
        digest.update(bits(variable))
    return digest.hexdigest()


def image_batches():
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(n, *SHAPE)).astype("float32"), rng.integers(0, CLASSES, n))
        for n in BATCHES
    ]


def assert_same_bits(build, batches, num_towers, choices, **options):
    """`choices`: arguments of `train`, which must not change its bits."""
    digests = {train(build, batches, num_towers, **choice, **options) for choice in choices}
    assert len(digests) == 1


def devices_of(*counts):
    return [{"num_devices": count} for count in counts]


def stages_of(*counts):
    options = {"policy": GPU, "jit_compile": False}  # XLA compiles no stages
    return [{"num_devices": 2 * n, "gpus_per_tower": n, **options} for n in counts]


def built_in(name):
    return lambda: BUILDERS[name](SHAPE, CLASSES)


LABELS = "sparse_categorical_crossentropy"


@pytest.mark.telling("cnn")
@pytest.mark.parametrize("name", BUILDERS)
def test_eight_towers_give_the_same_bits_on_any_number_of_devices(name):
    """Adam, dropout, BatchNormalization and a partial last batch."""
    counts = devices_of(*DEVICES.get(name, (3, 8)))
    assert_same_bits(built_in(name), image_batches(), 8, counts, loss=LABELS)


@pytest.mark.telling("policy1")
@pytest.mark.parametrize("policy", [None, GPU])
def test_uneven_numbers_of_towers_on_devices_give_the_same_bits(policy):
    uneven = [{"num_devices": len(n), "towers_per_device": n} for n in ([3, 1], [1, 1, 2])]
    choices = [{"num_devices": 1}, *uneven]
    assert_same_bits(built_in("cnn"), image_batches(), 4, choices, loss=LABELS, policy=policy)


@pytest.mark.matrix
@pytest.mark.parametrize("num_towers", [3, 6])
def test_odd_tower_counts_give_the_same_bits_on_any_number_of_devices(num_towers):
    assert_same_bits(
        built_in("notebook_cnn"),
        image_batches(),
        num_towers,
        devices_of(1, 2, 3),
        loss=LABELS,
        global_clipnorm=0.1,
    )


def odd_batches(case):
    rng = np.random.default_rng(0)
    return [case.batch(n, rng) for n in (9, 4)]


@pytest.mark.telling("embedding")
@pytest.mark.parametrize("case", [c for c in ODD if c.name != "ignore_class"], ids=str)
def test_odd_models_give_the_same_bits_on_any_number_of_devices(case, float64):
    assert_same_bits(case.build, odd_batches(case), 5, devices_of(2, 5), **case.compile)


@pytest.mark.matrix
@pytest.mark.parametrize("case", [c for c in ODD if c.name not in WITHOUT_STAGES], ids=str)
def test_odd_models_give_the_same_bits_in_stages(case, float64):
    assert_same_bits(case.build, odd_batches(case), 4, stages_of(1, 2), **case.compile)


@pytest.mark.matrix
@pytest.mark.parametrize("name", BUILDERS)
def test_built_in_models_give_the_same_bits_in_stages(name):
    assert_same_bits(built_in(name), image_batches(), 4, stages_of(1, 2, 3, 4), loss=LABELS)


@pytest.mark.telling("in_branch")
@pytest.mark.parametrize("name", NOISE)
def test_noise_of_tf_random_is_the_same_bits_on_any_number_of_devices(name):
    batches = [rows(n, np.random.default_rng(n)) for n in (9, 4)]
    assert_same_bits(lambda: noisy(name), batches, 4, devices_of(1, 4), loss="mse")


@pytest.mark.telling("mapped")
@pytest.mark.parametrize("name", NOISE)
def test_towers_draw_other_noise_by_tf_random(name):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), Noise(NOISE[name])])
    step = TowerStep(model, "sgd", "mse", num_towers=4, devices=devices.tower_devices(2, "cpu"))
    for size in (8, 3):
        assert len(np.unique(step.predict_batch(np.zeros((size, 6), "float32")))) == 6 * size


@pytest.mark.matrix
def test_the_tower_count_does_change_the_bits():
    """Otherwise the tests above could not fail."""
    batches = [rows(40, np.random.default_rng(0))]
    digests = {train(fan_out, batches, n, 2, loss="mse") for n in (2, 8)}
    assert len(digests) == 2
