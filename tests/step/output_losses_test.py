"""A tower's part of the loss: share * factor * loss of each output, and what layers add."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.step.losses import ModelLoss
from towers.step.output_losses import OutputLosses
from towers.step.shares import Shares

Y = np.float32([[0.0], [0.0]])
PREDICTIONS = [np.float32([[1.0], [3.0]]), np.float32([[2.0], [0.0]])]  # mse: 5 and 2; mae: 2 and 1


def bound(loss, loss_weights=None, names=None, outputs=PREDICTIONS):
    losses = OutputLosses(loss, loss_weights, names)
    losses.bind(outputs)
    return losses


def shares(*outputs, examples=0.5):
    return Shares(tf.constant(outputs, tf.float64), tf.constant(examples, tf.float64))


def test_the_total_is_the_sum_of_share_times_factor_times_loss():
    losses = bound(["mse", "mae"], [10.0, 100.0])
    total = losses.total([Y, Y], PREDICTIONS, None, [], shares(0.25, 0.5))
    assert float(total) == 0.25 * 10 * 5 + 0.5 * 100 * 1


def test_what_layers_add_comes_weighed():
    losses = bound(["mse", None])
    added = [tf.constant(7.0), tf.constant(9.0)]
    total = losses.total([Y, Y], PREDICTIONS, None, added, shares(1.0, 0.0, examples=0.25))
    assert float(total) == 5 + 7 + 9


def test_sample_weights_enter_as_keras_has_them():
    losses = bound(["mse", "mae"])
    weights = [tf.constant([2.0, 0.0]), None]
    total = losses.total([Y, Y], PREDICTIONS, weights, [], shares(1.0, 1.0))
    assert float(total) == (2 * 1 + 0 * 9) / 2 + 1
    one_for_all = losses.total([Y, Y], PREDICTIONS, tf.constant([2.0, 0.0]), [], shares(1.0, 1.0))
    assert float(one_for_all) == (2 * 1 + 0 * 9) / 2 + (2 * 2 + 0 * 0) / 2


def test_a_total_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="there is no loss: give a loss, or a layer that adds one"):
        bound(None).total(None, PREDICTIONS, None, [], shares(1.0, 1.0))


def test_labels_may_be_given_for_the_outputs_with_a_loss_alone():
    for y in ([Y + 1], [None, Y + 1], {"b": Y + 1}):
        losses = bound([None, "mse"], names=["a", "b"])
        total = losses.total(y, PREDICTIONS, None, [], shares(0.0, 1.0))
        assert float(total) == (1 + 1) / 2


def test_dicts_are_matched_by_name_whatever_their_order():
    outputs = {"b": PREDICTIONS[1], "a": PREDICTIONS[0]}
    losses = bound({"b": "mae", "a": "mse"}, {"a": 10.0, "b": 100.0}, outputs=outputs)
    y = {"b": Y, "a": Y + 1}
    total = losses.total(y, tf.nest.flatten(outputs), None, [], shares(1.0, 1.0))
    assert float(total) == 10 * (0 + 4) / 2 + 100 * 1


def test_a_models_own_loss_is_beside_no_output():
    losses = bound(ModelLoss(print))
    assert losses.model_loss is not None and losses.each == [None, None]
    assert losses.beside_outputs([Y, Y], "y") == [None, None]
    total = losses.total(Y, PREDICTIONS, None, [tf.constant(8.0)], shares(0.0, 0.0, examples=0.5))
    assert float(total) == 8


def test_the_first_outputs_are_bound_for_good():
    losses = bound("mse", outputs={"a": PREDICTIONS[0], "b": PREDICTIONS[1]})
    losses.bind(PREDICTIONS[0])
    assert losses.outputs == {"a": tf.float32, "b": tf.float32}
    assert len(losses.each) == 2


def test_each_output_weighs_its_own_examples_weights_or_valid_steps():
    mean = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    losses = bound(["mse", mean, None, "mse"], outputs=PREDICTIONS * 2)
    mask = tf.constant([[True, True, False], [True, False, False]])
    weights = losses.weigh(tf.constant([0.5, 2.0]), tf.constant(2), [None, None, None, mask])
    assert (weights.numpy().tolist(), weights.dtype) == ([2, 2.5, 0, 3], tf.float64)
    assert losses.weigh(None, tf.constant(0)).numpy().tolist() == [0] * 4


def masked_prediction():
    """[2, 3, 1], of which the second example's last two steps are masked."""
    values = np.array([[1, 2, 3], [4, 0, 0]], "float32")[..., np.newaxis]
    return keras.layers.Masking()(values)


def test_masks_are_those_of_the_outputs_and_of_their_losses():
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    classes = tf.fill([2, 3, 4], 0.25)
    predictions = [masked_prediction(), classes, masked_prediction()]
    losses = bound(["mse", ignoring, None], outputs=predictions)
    labels = [tf.zeros([2, 3, 1]), tf.constant([[0, -1, 1], [-1, -1, 2]]), None]
    first, second, third = losses.masks(labels, predictions)
    assert first.numpy().tolist() == [[True] * 3, [True, False, False]]
    assert second.numpy().tolist() == [[True, False, True], [False, False, True]]
    assert third is None


@pytest.mark.parametrize("loss, is_masked, expected", [
    ("mse", False, False),
    ("mse", True, True),
    (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), False, True),
    (None, True, False),  # nobody weighs it
])
def test_masks_matter_where_an_output_with_a_loss_has_one(loss, is_masked, expected):
    prediction = tf.fill([2, 3, 4], 0.25)
    losses = bound([loss], outputs=[prediction])
    mask = tf.ones([2, 3], tf.bool) if is_masked else None
    labels = tf.zeros([2, 3, 4] if loss == "mse" else [2, 3])
    assert losses.have_masks([labels], [prediction], [mask]) is expected
