"""For every model, shard split and batch: the averaged gradient is the large-batch gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.cases import BUILT_IN, ODD, Case
from towers.machine import devices
from towers.step import TowerStep

TOWERS = [1, 2, 3, 5, 8]
BATCHES = [1, 7, 8, 9, 40]


def keras_gradients(model, case):
    """(x, y, sample_weight) -> loss and gradients, as Keras' own train_step computes them."""
    model.compile("sgd", **case.compile)

    @tf.function(reduce_retracing=True, autograph=False)
    def compute(x, y, sample_weight):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), sample_weight, training=True)
        return loss, tape.gradient(loss, model.trainable_variables)

    return lambda batch: compute(
        *tf.nest.map_structure(lambda v: None if v is None else tf.convert_to_tensor(v), batch)
    )


def relative_difference(ours, theirs):
    ours, theirs = (np.array(tf.convert_to_tensor(v)) for v in (ours, theirs))
    return np.max(np.abs(ours - theirs)) / max(np.max(np.abs(theirs)), 1e-30)


@pytest.mark.parametrize("num_towers", TOWERS)
@pytest.mark.parametrize("case", BUILT_IN + ODD, ids=str)
def test_averaged_gradient_is_the_large_batch_gradient(case: Case, num_towers: int, float64):
    keras.utils.set_random_seed(7)
    model = case.build()
    step = TowerStep(
        model, "sgd", **case.compile, num_towers=num_towers,
        devices=devices.tower_devices(num_towers, "cpu"),
    )
    compute = keras_gradients(model, case)
    for size in BATCHES:
        batch = case.batch(size, np.random.default_rng(size))
        loss, gradients = step.gradients(*batch)
        expected_loss, expected = compute(batch)
        assert relative_difference(loss, expected_loss) < 1e-10, f"loss, batch {size}"
        for variable, ours, theirs in zip(
            model.trainable_variables, gradients, expected, strict=True
        ):
            assert relative_difference(ours, theirs) < 1e-10, f"{variable.path}, batch {size}"
    assert len(step._graphs.functions) == 1, "a partial batch must not be traced anew"
