"""A shard's part of the loss: its weight, its share, and the sum of share * factor * loss."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.machine.loss_internals import LossTerm
from towers.step import losses, outputs
from towers.step.losses import SHARES_SPEC, Losses, Shares, tower_shares
from towers.step.outputs import ModelLoss
from towers.step.sharding import shard_batch

REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
SIZES = (3, 1, 4)  # of the shards: with equal ones a wrong weight would not show


class AbsoluteError(keras.losses.Loss):
    """A loss whose reduction is its own, and no reduction of Keras'."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))


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
        mask = outputs.loss_mask(loss, labels, predicted)
        assert (mask is not None) is is_masked
        w = losses.shard_weight(loss, weight, tf.constant(len(y[rows])), mask)
        return float(loss(labels, predicted, weight)), float(w)

    expected, _ = of(slice(None))
    ends = np.cumsum(SIZES)
    parts = [of(slice(end - size, end)) for end, size in zip(ends, SIZES, strict=True)]
    total = sum(value * w for value, w in parts)
    if not outputs.is_sum(loss):
        total /= sum(w for _, w in parts)
    assert total == pytest.approx(expected, rel=1e-12)  # rounding of another order of additions


@pytest.mark.parametrize("reduction, sample_weight, mask, expected", [
    ("sum_over_batch_size", None, None, 3),
    ("sum_over_batch_size", [1.0, 2.0, 4.0], None, 3),  # Keras divides by examples all the same
    ("sum_over_batch_size", None, [[True, False], [True, True], [False, False]], 3),
    ("mean", None, None, 3),
    ("mean_with_sample_weight", None, None, 3),
    ("mean_with_sample_weight", [1.0, 2.0, 4.0], None, 7),
    ("mean_with_sample_weight", [1.0, 2.0, 4.0],
     [[True, False], [True, True], [False, False]], 5),
    ("sum", [1.0, 2.0, 4.0], None, 1),
])
def test_the_weight_of_three_examples_is_the_denominator_of_the_reduction(
    reduction, sample_weight, mask, expected
):
    weight = None if sample_weight is None else tf.constant(sample_weight)
    mask = None if mask is None else tf.constant(mask)
    w = losses.shard_weight(squared_error(reduction), weight, tf.constant(3), mask)
    assert (float(w), w.dtype, w.shape.rank) == (expected, tf.float64, 0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_shard_weighs_nothing_whatever_its_one_row_says(reduction):
    row, mask = tf.constant([5.0]), tf.constant([True])
    assert float(losses.shard_weight(squared_error(reduction), row, tf.constant(0), mask)) == 0


def test_a_loss_masks_by_itself_and_with_its_outputs_mask():
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=9)
    labels = tf.constant([[0, 9, 1, 9]])
    y_pred = tf.constant([[[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]])
    masked = keras.layers.Masking()(y_pred)
    assert outputs.loss_mask(ignoring, labels, y_pred).numpy().tolist() == [[True, False] * 2]
    both = outputs.loss_mask(ignoring, labels, masked)
    assert both.numpy().tolist() == [[True, False, False, False]]
    plain = keras.losses.SparseCategoricalCrossentropy()
    assert outputs.loss_mask(plain, labels, y_pred) is None
    assert outputs.makes_mask(ignoring, labels, y_pred)
    assert not outputs.makes_mask(plain, labels, y_pred)


def test_asking_whether_a_loss_masks_leaves_the_callers_graph_as_it_is():
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=9)
    with tf.Graph().as_default() as graph:
        labels = tf.constant([0, 9])
        y_pred = tf.constant([[0.5, 0.5], [0.5, 0.5]])
        before = len(graph.get_operations())
        assert outputs.makes_mask(ignoring, labels, y_pred)
        assert len(graph.get_operations()) == before


def test_a_loss_with_a_call_of_its_own_is_a_mean_over_examples():
    loss = AbsoluteError(reduction="sum")
    assert outputs.overrides_call(loss) and not outputs.is_sum(loss)
    assert outputs.loss_reduction(loss) == "mean"
    assert not outputs.makes_mask(loss, tf.zeros([2, 1]), tf.zeros([2, 1]))
    assert float(losses.shard_weight(loss, None, tf.constant(3))) == 3


# The shares of towers.

def term(reduction="sum_over_batch_size", sample_weight=None):
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    return LossTerm(loss, 1.0, None, None, sample_weight)


MEAN, SUM = term(), term("sum")
BY_WEIGHTS = term("mean_with_sample_weight", sample_weight=np.ones(7))


def shares_of(terms, weights, num_examples=7):
    """Of T x K weights; the examples in 3 shards of 3, 2 and 2."""
    shards = shard_batch(tf.range(num_examples), len(weights))
    weights = [tf.constant(each, tf.float64) for each in weights]
    return tower_shares(terms, weights, shards)


def test_each_term_is_divided_by_the_sum_of_its_own_weights():
    found = shares_of([MEAN, MEAN], [[3.0, 1.0], [1.0, 0.0], [4.0, 1.0]])
    assert [each.terms.numpy().tolist() for each in found] == [
        [3 / 8, 1 / 2], [1 / 8, 0], [4 / 8, 1 / 2]
    ]


def test_a_plain_sum_counts_as_it_is():
    found = shares_of([SUM, MEAN], [[1.0, 3.0], [1.0, 2.0], [0.0, 0.0]])  # the last shard is empty
    assert [each.terms.numpy().tolist() for each in found] == [[1, 0.6], [1, 0.4], [0, 0]]


def test_sums_over_sample_weights_are_divided_by_all_weights_though_a_shards_are_zero():
    weights = [[3.0, 3.0], [0.0, 0.0], [-1.0, -1.0]]
    found = shares_of([BY_WEIGHTS, MEAN], weights)
    assert [each.terms.numpy().tolist() for each in found] == [
        [0.5, 1.5], [0.5, 0], [0.5, -0.5]
    ]


def test_losses_of_layers_are_divided_by_examples_whatever_the_outputs_weigh():
    found = shares_of([MEAN], [[1.0], [1.0], [100.0]])
    assert [float(each.examples) for each in found] == [3 / 7, 2 / 7, 2 / 7]


def test_weights_of_zero_count_nothing_and_are_no_nan():
    found = shares_of([MEAN], [[0.0]] * 3)
    assert [each.terms.numpy().tolist() for each in found] == [[0]] * 3
    assert [each.terms.shape for each in shares_of([], [[]] * 3)] == [[0]] * 3


@pytest.mark.parametrize("num_towers", [1, 2, 3, 5, 8])
def test_shares_add_up_to_one(num_towers):
    weights = np.random.default_rng(num_towers).uniform(0.1, 9, (num_towers, 1))
    found = shares_of([MEAN], weights.tolist(), num_examples=5)
    # float64, one rounding a share
    assert sum(float(each.terms[0]) for each in found) == pytest.approx(1, rel=1e-15)
    assert sum(float(each.examples) for each in found) == pytest.approx(1, rel=1e-15)


def test_shares_fit_the_spec_that_towers_are_traced_for():
    (found,) = shares_of([MEAN, SUM], [[1.0, 1.0]])
    for spec, tensor in zip(SHARES_SPEC, found, strict=True):
        assert spec.is_compatible_with(tensor)


# A tower's part.

Y = np.float32([[0.0], [0.0]])
PREDICTIONS = [np.float32([[1.0], [3.0]]), np.float32([[2.0], [0.0]])]  # mse: 5 and 2; mae: 2 and 1


def bound(loss, loss_weights=None, names=None, outputs=PREDICTIONS):
    losses = Losses(loss, loss_weights, names)
    losses.bind(outputs)
    return losses


def shares(*terms, examples=0.5):
    return Shares(tf.constant(terms, tf.float64), tf.constant(examples, tf.float64))


def test_the_total_is_the_sum_of_share_times_factor_times_loss():
    losses = bound(["mse", "mae"], [10.0, 100.0])
    total = losses.total([Y, Y], PREDICTIONS, None, [], shares(0.25, 0.5))
    assert float(total) == 0.25 * 10 * 5 + 0.5 * 100 * 1


def test_what_layers_add_comes_weighed():
    losses = bound(["mse", None])
    added = [tf.constant(7.0), tf.constant(9.0)]
    total = losses.total([Y, Y], PREDICTIONS, None, added, shares(1.0, examples=0.25))
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
    for y in ([Y + 1], [None, Y + 1]):
        losses = bound([None, "mse"], names=["a", "b"])
        total = losses.total(y, PREDICTIONS, None, [], shares(1.0))
        assert float(total) == (1 + 1) / 2


def test_dicts_are_matched_by_name_whatever_their_order():
    outputs = {"b": PREDICTIONS[1], "a": PREDICTIONS[0]}
    losses = bound({"b": "mae", "a": "mse"}, {"a": 10.0, "b": 100.0}, outputs=outputs)
    y = {"b": Y, "a": Y + 1}
    total = losses.total(y, tf.nest.flatten(outputs), None, [], shares(1.0, 1.0))
    assert float(total) == 10 * (0 + 4) / 2 + 100 * 1


def test_a_models_own_loss_is_beside_no_output():
    losses = bound(ModelLoss(print))
    assert losses.model_loss is not None and losses.terms([Y, Y], None) == []
    total = losses.total(Y, PREDICTIONS, None, [tf.constant(8.0)], shares(examples=0.5))
    assert float(total) == 8


def test_the_first_outputs_are_bound_for_good():
    losses = bound("mse", outputs={"a": PREDICTIONS[0], "b": PREDICTIONS[1]})
    losses.bind(PREDICTIONS[0])
    assert losses.outputs == {"a": tf.float32, "b": tf.float32}


def test_each_output_weighs_its_own_examples_weights_or_valid_steps():
    mean = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    losses = bound(["mse", mean, None, "mse"], outputs=PREDICTIONS * 2)
    mask = tf.constant([[True, True, False], [True, False, False]])
    y = [Y] * 4
    weights = losses.weigh(y, tf.constant([0.5, 2.0]), tf.constant(2), [None, None, mask])
    assert (weights.numpy().tolist(), weights.dtype) == ([2, 2.5, 3], tf.float64)
    assert losses.weigh(y, None, tf.constant(0)).numpy().tolist() == [0] * 3


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
    first, second = losses.masks(labels, predictions)
    assert first.numpy().tolist() == [[True] * 3, [True, False, False]]
    assert second.numpy().tolist() == [[True, False, True], [False, False, True]]


@pytest.mark.parametrize("loss, is_masked, expected", [
    ("mse", False, False),
    ("mse", True, True),
    (keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), False, True),
    (None, True, False),  # nobody weighs it
])
def test_masks_matter_where_an_output_with_a_loss_has_one(loss, is_masked, expected):
    prediction = tf.fill([2, 3, 4], 0.25)
    losses = bound(loss, outputs=prediction)
    mask = tf.ones([2, 3], tf.bool) if is_masked else None
    labels = tf.zeros([2, 3, 4] if loss == "mse" else [2, 3])
    assert losses.have_masks(labels, [prediction], [mask]) is expected
