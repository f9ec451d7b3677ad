"""A shard's part of the loss: its weight, its share, and the sum of share * factor * loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.step import loss_kinds, losses

REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
SIZES = (3, 1, 4)  # of the shards: with equal ones a wrong weight would not show


def squared_error(reduction="sum_over_batch_size"):
    return keras.losses.MeanSquaredError(reduction=reduction, dtype="float64")


def with_mask(y_pred):
    """Keras' mask on rows [n, steps, outputs] of which padded steps are all zeros."""
    return keras.layers.Masking(dtype="float64")(y_pred)


def global_batch(is_masked):
    """y, y_pred [8, 5, 2], sample weights [8, 5]."""
    rng = np.random.default_rng(0)
    y, y_pred = rng.normal(size=(2, sum(SIZES), 5, 2))
    if is_masked:
        y_pred[np.arange(5) >= rng.integers(1, 6, sum(SIZES))[:, None]] = 0
    return y, y_pred, rng.uniform(0.1, 3.0, (sum(SIZES), 5))


@pytest.mark.parametrize("weighted_steps", [0, 1, 5])  # 1: one weight for all steps of an example
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weighted_by_its_denominator_shards_give_keras_loss_of_all(
    reduction, is_masked, weighted_steps, float64
):
    loss = squared_error(reduction)
    y, y_pred, sample_weight = global_batch(is_masked)

    def of(rows):
        """(L_i, w_i) of a slice of the global batch."""
        predicted = tf.constant(y_pred[rows])
        predicted = with_mask(predicted) if is_masked else predicted
        weight = tf.constant(sample_weight[rows, :weighted_steps]) if weighted_steps else None
        labels = tf.constant(y[rows])
        mask = loss_kinds.loss_mask(loss, labels, predicted)
        assert (mask is not None) is is_masked
        w = losses.shard_weight(loss, weight, tf.constant(len(y[rows])), mask)
        return float(loss(labels, predicted, weight)), float(w)

    expected, _ = of(slice(None))
    ends = np.cumsum(SIZES)
    parts = [of(slice(end - size, end)) for end, size in zip(ends, SIZES, strict=True)]
    total = sum(value * w for value, w in parts)
    if loss_kinds.loss_reduction(loss) != "sum":
        total /= sum(w for _, w in parts)
    assert total == pytest.approx(expected, rel=1e-12)  # rounding of another order of additions


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_shard_weighs_nothing_whatever_its_one_row_says(reduction):
    row, mask = tf.constant([5.0]), tf.constant([True])
    assert float(losses.shard_weight(squared_error(reduction), row, tf.constant(0), mask)) == 0


def test_a_loss_masks_by_itself_and_with_its_outputs_mask():
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=9)
    labels = tf.constant([[0, 9, 1, 9]])
    y_pred = tf.constant([[[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]])
    masked = keras.layers.Masking()(y_pred)
    assert loss_kinds.loss_mask(ignoring, labels, y_pred).numpy().tolist() == [[True, False] * 2]
    both = loss_kinds.loss_mask(ignoring, labels, masked)
    assert both.numpy().tolist() == [[True, False, False, False]]
    plain = keras.losses.SparseCategoricalCrossentropy()
    assert loss_kinds.loss_mask(plain, labels, y_pred) is None
    assert loss_kinds.makes_mask(ignoring, labels, y_pred)
    assert not loss_kinds.makes_mask(plain, labels, y_pred)


def make_step(loss, num_towers=3):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    return towers.TowerStep(model, devices=["/cpu:0"], num_towers=num_towers)


def test_weights_of_zero_count_nothing_and_are_no_nan():
    step = make_step(keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    loss, gradients = step.gradients(np.ones((7, 4)), np.ones((7, 2)), np.zeros(7))
    assert float(loss) == 0 and not any(np.any(gradient) for gradient in gradients)


def test_a_total_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="there is no loss: give a loss, or a layer that adds one"):
        make_step(None)(np.ones((7, 4)), np.ones((7, 2)))
