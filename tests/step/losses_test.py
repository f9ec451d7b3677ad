"""Each shard's weight makes its loss a part of Keras' own loss of the global batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.step import losses

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
        mask = losses.loss_mask(loss, labels, predicted)
        assert (mask is not None) is is_masked
        w = losses.shard_weight(loss, weight, tf.constant(len(y[rows])), mask)
        return float(loss(labels, predicted, weight)), float(w)

    expected, _ = of(slice(None))
    ends = np.cumsum(SIZES)
    parts = [of(slice(end - size, end)) for end, size in zip(ends, SIZES, strict=True)]
    total = sum(value * w for value, w in parts)
    if not losses.is_sum(loss):
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
    assert losses.loss_mask(ignoring, labels, y_pred).numpy().tolist() == [[True, False] * 2]
    both = losses.loss_mask(ignoring, labels, masked)
    assert both.numpy().tolist() == [[True, False, False, False]]
    plain = keras.losses.SparseCategoricalCrossentropy()
    assert losses.loss_mask(plain, labels, y_pred) is None
    assert [losses.makes_mask(loss, labels, y_pred) for loss in (ignoring, plain)] == [True, False]


def test_asking_whether_a_loss_masks_leaves_the_callers_graph_as_it_is():
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=9)
    with tf.Graph().as_default() as graph:
        labels = tf.constant([0, 9])
        y_pred = tf.constant([[0.5, 0.5], [0.5, 0.5]])
        before = len(graph.get_operations())
        assert losses.makes_mask(ignoring, labels, y_pred)
        assert len(graph.get_operations()) == before


def test_a_loss_with_a_call_of_its_own_is_a_mean_over_examples():
    loss = AbsoluteError(reduction="sum")
    assert losses.overrides_call(loss) and not losses.is_sum(loss)
    assert losses.loss_reduction(loss) == "mean"
    assert not losses.makes_mask(loss, tf.zeros([2, 1]), tf.zeros([2, 1]))
    assert float(losses.shard_weight(loss, None, tf.constant(3))) == 3


A_LIST, A_DICT = ["p", "q"], {"b": "q", "a": "p"}  # structures of outputs; dicts in sorted order


@pytest.mark.parametrize("value, outputs, expected", [
    (5, "one", [5]),
    (None, A_LIST, [None, None]),
    ([5, 6], A_LIST, [5, 6]),
    ((5, 6), A_DICT, [5, 6]),
    ({"first": 5, "second": 6}, A_LIST, [5, 6]),  # by the outputs' names
    ({"second": 6}, A_LIST, [None, 6]),
    ({"a": 5, "b": 6}, A_DICT, [5, 6]),
    ({"b": 6}, A_DICT, [None, 6]),
])
def test_a_value_is_laid_beside_the_flattened_outputs(value, outputs, expected):
    names = ["first", "second"] if outputs is A_LIST else None
    assert losses.per_output(value, outputs, names, "y") == expected


def test_one_value_stands_for_every_output_only_where_it_may():
    assert losses.per_output(5, A_LIST, None, "loss", repeat=True) == [5, 5]
    with pytest.raises(ValueError, match="y is one value, but the model has 2 outputs"):
        losses.per_output(5, A_LIST, None, "y")


@pytest.mark.parametrize("value, message", [
    ([1, 2, 3], "y has 3 entries, but the model has 2 outputs"),
    ({"first": 1, "third": 3}, r"y names \['third'\]; the outputs are \['first', 'second'\]"),
])
def test_what_does_not_match_the_outputs_is_refused_with_both(value, message):
    with pytest.raises(ValueError, match=message):
        losses.per_output(value, A_LIST, ["first", "second"], "y")


def test_losses_are_resolved_from_names_functions_and_objects():
    def distance(y_true, y_pred):
        return keras.ops.sum(keras.ops.abs(y_true - y_pred), axis=-1)

    given = ["mse", distance, squared_error("sum"), None]
    resolved = losses.resolve_losses(given, [1, 0.5, None, 3], [1, 2, 3, 4])
    assert resolved[3] is None
    assert resolved[2].loss is given[2]
    assert [each.factor for each in resolved[:3]] == [1, 0.5, 1]
    y, y_pred = tf.zeros([2, 2]), tf.constant([[1.0, 2.0], [3.0, 4.0]])
    values = [float(each.loss(y, y_pred)) for each in resolved[:3]]
    assert values == [7.5, 5.0, 15.0]  # (1+4+9+16)/4; the mean of 3 and 7; the sum of 2.5 and 12.5


def test_one_loss_is_every_outputs_and_a_models_own_is_nones():
    one, other = losses.resolve_losses("mse", None, A_LIST)
    y, y_pred = tf.zeros([2, 2]), tf.constant([[1.0, 2.0], [3.0, 4.0]])
    assert [float(each.loss(y, y_pred)) for each in (one, other)] == [7.5, 7.5]
    assert losses.resolve_losses(losses.ModelLoss(print), None, A_LIST) == [None, None]


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_that_is_no_one_number_is_refused(reduction):
    with pytest.raises(ValueError, match="must be one number. Use one of sum_over_batch_size"):
        losses.resolve_losses(squared_error(reduction), None, "one")
