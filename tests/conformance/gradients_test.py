"""For every model, shard split and batch: the averaged gradient is the full-batch gradient."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.cases import BUILT_IN, Case, ODD
from towers.machine import devices
from towers.divide.tower_step import TowerStep
from towers.step.structures import as_tensor, map_tensors

TOWERS = [1, 2, 3, 5, 8]
BATCHES = [1, 7, 41]  # empty shards, and uneven ones
# A warning would say that something of these models that takes time runs once.
pytestmark = pytest.mark.filterwarnings("error::towers.machine.user_lines.TowersWarning")

CASES = {case.name: case for case in BUILT_IN + ODD}


def make_model(case):
    keras.utils.set_random_seed(7)
    return case.build()


@functools.cache
def expected_gradients(name):
    """{batch size: (loss, gradients)} of a case, as Keras' own train_step computes them."""
    case = CASES[name]
    compute = keras_gradients(make_model(case), case)
    found = {}
    for size in BATCHES:
        loss, gradients = compute(case.batch(size, np.random.default_rng(size)))
        found[size] = as_array(loss), [as_array(gradient) for gradient in gradients]
    return found


def keras_gradients(model, case):
    """(x, y, sample_weight) -> loss and gradients."""
    model.compile("sgd", **case.compile)

    def compute(x, y, sample_weight):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), sample_weight, training=True)
        return loss, tape.gradient(loss, model.trainable_variables)

    return lambda batch: compute(*map_tensors(as_tensor, batch))


def as_array(value):
    return np.array(tf.convert_to_tensor(value))  # of IndexedSlices, too


def relative_difference(ours, theirs):
    ours, theirs = as_array(ours), as_array(theirs)
    return np.max(np.abs(ours - theirs)) / max(np.max(np.abs(theirs)), 1e-30)


@pytest.mark.telling(  # the other models are similar to one of these
    "resnet20-3",
    "two_outputs_dict-3",
    "nested_outputs-3",
    "embedding-3",
    "ragged_output-3",
    "sparse-3",
    "masked_gru-3",
    "activity-3",
    "adds_loss-3",
    "weights_of_both_signs-3",
    "sum-3",
)
@pytest.mark.parametrize("num_towers", TOWERS)
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_the_averaged_gradient_is_the_full_batch_gradient(case: Case, num_towers: int, float64):
    model = make_model(case)
    step = TowerStep(
        model,
        "sgd",
        **case.compile,
        num_towers=num_towers,
        devices=devices.tower_devices(num_towers, "cpu"),
        jit_compile=False,
    )  # step/xla_test compares programs of XLA
    for size, (expected_loss, expected) in expected_gradients(case.name).items():
        loss, gradients = step.gradients(*case.batch(size, np.random.default_rng(size)))
        assert relative_difference(loss, expected_loss) < 1e-10, f"loss, batch {size}"
        for variable, ours, theirs in zip(
            model.trainable_variables, gradients, expected, strict=True
        ):
            assert relative_difference(ours, theirs) < 1e-10, f"{variable.path}, batch {size}"
    assert len(step.traces) == 1, "a partial batch must not be traced anew"
