"""What each tower's losses count: fractions that add up to one, exactly where Keras divides."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.step.losses import OutputLoss
from towers.step.sharding import shard_batch
from towers.step.shares import SHARES_SPEC, tower_shares

MEAN = OutputLoss(keras.losses.MeanSquaredError(), 1.0)
SUM = OutputLoss(keras.losses.MeanSquaredError(reduction="sum"), 1.0)


def shares_of(losses, weights, num_examples=7, by_weights=None):
    """Of T x O weights; the examples in 3 shards of 3, 2 and 2."""
    shards = shard_batch(tf.range(num_examples), len(weights))
    weights = [tf.constant(each, tf.float64) for each in weights]
    return tower_shares(losses, weights, shards, by_weights or [False] * len(losses))


def test_each_output_is_divided_by_the_sum_of_its_own_weights():
    found = shares_of([MEAN, MEAN], [[3.0, 1.0], [1.0, 0.0], [4.0, 1.0]])
    assert [each.outputs.numpy().tolist() for each in found] == [
        [3 / 8, 1 / 2], [1 / 8, 0], [4 / 8, 1 / 2]
    ]


def test_a_plain_sum_counts_as_it_is():
    found = shares_of([SUM, MEAN], [[1.0, 3.0], [1.0, 2.0], [0.0, 0.0]])  # the last shard is empty
    assert [each.outputs.numpy().tolist() for each in found] == [[1, 0.6], [1, 0.4], [0, 0]]


def test_sums_over_sample_weights_are_divided_by_all_weights_though_a_shards_are_zero():
    weights = [[3.0, 3.0], [0.0, 0.0], [-1.0, -1.0]]
    found = shares_of([MEAN, MEAN], weights, by_weights=[True, False])
    assert [each.outputs.numpy().tolist() for each in found] == [
        [0.5, 1.5], [0.5, 0], [0.5, -0.5]
    ]


def test_losses_of_layers_are_divided_by_examples_whatever_the_outputs_weigh():
    found = shares_of([MEAN], [[1.0], [1.0], [100.0]])
    assert [float(each.examples) for each in found] == [3 / 7, 2 / 7, 2 / 7]


def test_weights_of_zero_and_an_output_without_a_loss_count_nothing_and_are_no_nan():
    found = shares_of([MEAN, None], [[0.0, 0.0]] * 3)
    assert [each.outputs.numpy().tolist() for each in found] == [[0, 0]] * 3


@pytest.mark.parametrize("num_towers", [1, 2, 3, 5, 8])
def test_shares_add_up_to_one(num_towers):
    weights = np.random.default_rng(num_towers).uniform(0.1, 9, (num_towers, 1))
    found = shares_of([MEAN], weights.tolist(), num_examples=5)
    # float64, one rounding a share
    assert sum(float(each.outputs[0]) for each in found) == pytest.approx(1, rel=1e-15)
    assert sum(float(each.examples) for each in found) == pytest.approx(1, rel=1e-15)


def test_shares_fit_the_spec_that_towers_are_traced_for():
    (found,) = shares_of([MEAN, SUM], [[1.0, 1.0]])
    for spec, tensor in zip(SHARES_SPEC, found, strict=True):
        assert spec.is_compatible_with(tensor)
