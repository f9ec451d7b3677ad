"""A shard's part of the loss; and losses by what they are to the rows: means, sums, or neither.

Operations are in graph/rows_test.py; here are what losses make of them, and what Keras adds.
Each verdict is compared with numbers: the loss of a batch, beside the weighted losses of its parts.
Labels have missing values (-1), of which the first part has more than the second.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.machine.loss_internals import function_loss
from towers.step.gathering import NeedsOtherTowers
from towers.step.loss_kinds import (check_loss, loss_fault, loss_mask, loss_reduction, makes_mask,
                                    overrides_call)
from towers.step.losses import shard_weight

losses = keras.losses
REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")
SIZES = (3, 1, 4)  # of the shards: with equal ones a wrong weight would not show
ROWS = tf.TensorSpec([None, 3], tf.float64)
CLASSES = tf.TensorSpec([None], tf.float64)  # as Keras hands integer labels on
STEPS = tf.TensorSpec([None, 6], tf.float64), tf.TensorSpec([None, 6, 5], tf.float64)
IMAGES = (tf.TensorSpec([None, 6, 6, 3], tf.float64),) * 2
RAGGED = (tf.RaggedTensorSpec([None, None, 1], tf.float64, ragged_rank=1),) * 2


def squared_error(reduction="sum_over_batch_size"):
    return losses.MeanSquaredError(reduction=reduction, dtype="float64")


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
        mask = loss_mask(loss, labels, predicted)
        assert (mask is not None) is is_masked
        w = shard_weight(loss, weight, tf.constant(len(y[rows])), mask)
        return float(loss(labels, predicted, weight)), float(w)

    expected, _ = of(slice(None))
    ends = np.cumsum(SIZES)
    parts = [of(slice(end - size, end)) for end, size in zip(ends, SIZES, strict=True)]
    total = sum(value * w for value, w in parts)
    if loss_reduction(loss) != "sum":
        total /= sum(w for _, w in parts)
    assert total == pytest.approx(expected, rel=1e-12)  # rounding of another order of additions


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_an_empty_shard_weighs_nothing_whatever_its_one_row_says(reduction):
    row, mask = tf.constant([5.0]), tf.constant([True])
    assert float(shard_weight(squared_error(reduction), row, tf.constant(0), mask)) == 0


def test_a_loss_masks_by_itself_and_with_its_outputs_mask():
    ignoring = losses.SparseCategoricalCrossentropy(ignore_class=9)
    labels = tf.constant([[0, 9, 1, 9]])
    y_pred = tf.constant([[[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]])
    masked = keras.layers.Masking()(y_pred)
    assert loss_mask(ignoring, labels, y_pred).numpy().tolist() == [[True, False] * 2]
    both = loss_mask(ignoring, labels, masked)
    assert both.numpy().tolist() == [[True, False, False, False]]
    plain = losses.SparseCategoricalCrossentropy()
    assert loss_mask(plain, labels, y_pred) is None
    assert makes_mask(ignoring, labels, y_pred)
    assert not makes_mask(plain, labels, y_pred)


def test_the_mask_of_ignore_class_needs_no_predictions():
    """Otherwise their forward pass would run a second time, for the weights of the shards."""
    @tf.function(autograph=False)
    def masked(labels, y_pred):
        return loss_mask(losses.SparseCategoricalCrossentropy(ignore_class=9), labels, y_pred)

    specs = tf.TensorSpec([None, 4], tf.int32), tf.TensorSpec([None, 4, 2])
    _, y_pred = masked.get_concrete_function(*specs).inputs
    assert not y_pred.consumers()


def make_step(loss, num_towers=3):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    return towers.TowerStep(model, devices=["/cpu:0"], num_towers=num_towers)


def test_weights_of_zero_count_nothing_and_are_no_nan():
    step = make_step(losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    loss, gradients = step.gradients(np.ones((7, 4)), np.ones((7, 2)), np.zeros(7))
    assert float(loss) == 0 and not any(np.any(gradient) for gradient in gradients)


def test_a_total_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="there is no loss: give a loss, or a layer that adds one"):
        make_step(None)(np.ones((7, 4)), np.ones((7, 2)))


# Kinds of losses


def count(y):
    return tf.cast(tf.shape(y)[0], y.dtype)


def known(y):
    return tf.cast(y != -1.0, y.dtype)


def as_classes(y):
    return tf.maximum(tf.cast(y, tf.int32), 0)


def entropies(y, p):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(as_classes(y), p)


def as_matrix(y):
    return tf.reshape(y, [tf.shape(y)[0], -1])


MEANS = {
    "rows": lambda y, p: tf.reduce_mean((y - p) ** 2, -1),
    "a mean": lambda y, p: tf.reduce_mean((y - p) ** 2),
    "a sum by n": lambda y, p: tf.reduce_sum((y - p) ** 2) / count(y),
    "a mean in each row": lambda y, p: (
        tf.reduce_sum(known(y) * (y - p) ** 2, -1) / (tf.reduce_sum(known(y), -1) + 1e-8)),
    "chosen, by n": lambda y, p: tf.reduce_sum(tf.boolean_mask(p, y[:, 0] != -1.0)) / count(y),
    "a triplet's": lambda y, p: tf.nn.relu(tf.reduce_sum((p[:, :1] - p[:, 1:]) ** 2, 1) - y[:, 0]),
}
OF_CLASSES = {
    "entropies": entropies,
    "by class": lambda y, p: tf.gather(tf.constant([1.0, 2.0, 3.0], p.dtype), as_classes(y)) * (
        entropies(y, p)),
    "by index": lambda y, p: -tf.math.log(tf.gather(p, as_classes(y), batch_dims=1)),
}
OF_IMAGES = {
    "Dice of each": losses.Dice(axis=(1, 2)),
    "Dice of each, flat": lambda y, p: 1 - (2 * tf.reduce_sum(as_matrix(y * p), 1) + 1) / (
        tf.reduce_sum(as_matrix(y + p), 1) + 9),
}
OTHERS = {
    "masked": lambda y, p: tf.reduce_sum(known(y) * (y - p) ** 2) / tf.reduce_sum(known(y)),
    "rows by n": lambda y, p: tf.reduce_sum((y - p) ** 2, -1) / count(y),
    "Dice": losses.Dice(),
    "Tversky": losses.Tversky(),
}
OF_RAGGED = {
    "sums of rows": lambda y, p: tf.reduce_sum((y - p) ** 2, axis=[1, 2]),
    "means of rows": lambda y, p: tf.reduce_mean((y - p) ** 2, axis=[1, 2]),
    "mapped rows": lambda y, p: tf.map_fn(
        lambda row: tf.reduce_mean(row[0] * row[1]), (y, p), fn_output_signature=tf.float64),
}
NOT_OF_RAGGED = {
    "a mean of all values": lambda y, p: tf.reduce_mean((y - p) ** 2),
    "padded to the longest": lambda y, p: tf.reduce_mean((y - p).to_tensor() ** 2, axis=[1, 2]),
}


class WeightedByHand(losses.Loss):
    """A mean over the weights, without Keras' reduction."""

    def __call__(self, y, y_pred, sample_weight=None):
        errors = tf.reduce_mean((y - y_pred) ** 2, -1)
        weights = tf.ones_like(errors) if sample_weight is None else sample_weight
        return tf.reduce_sum(weights * errors) / tf.reduce_sum(weights)


class Scalar(losses.Loss):
    def call(self, y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2)


def cases(table, y, y_pred):
    return [pytest.param(loss, y, y_pred, id=name) for name, loss in table.items()]


def resolved(loss):
    return loss if isinstance(loss, losses.Loss) else function_loss(loss)


def rows_of(spec, is_label):
    """10 rows; of labels, the first 4 are mostly missing."""
    rng = np.random.default_rng(3)
    values = rng.uniform(0.1, 0.9, [10, *spec.shape[1:]])
    if is_label:
        missing = rng.uniform(size=values.shape) < np.linspace(0.9, 0.0, 10).reshape(
            [10, *[1] * (values.ndim - 1)])
        values = np.where(missing, -1.0, rng.integers(0, 3, values.shape))
    return tf.constant(values, spec.dtype)


def difference(loss, y, y_pred):
    """Of the whole batch's loss, and what towers with 4 and 6 rows make of theirs; relative."""
    y, y_pred = rows_of(y, True), rows_of(y_pred, False)

    def value(rows):
        return float(loss(y[rows], y_pred[rows]))

    def weight(rows):
        mask = None if overrides_call(loss) else loss_mask(loss, y[rows], y_pred[rows])
        return float(shard_weight(loss, None, tf.shape(y_pred[rows])[0], mask))

    parts = [slice(0, 4), slice(4, 10)]
    total = 1.0 if loss_reduction(loss) == "sum" else sum(map(weight, parts))
    towers_loss = sum(value(part) * weight(part) for part in parts) / total
    return abs(towers_loss - value(slice(0, 10))) / abs(value(slice(0, 10)))


@pytest.mark.parametrize("loss, y, y_pred", [
    *cases(MEANS, ROWS, ROWS), *cases(OF_CLASSES, CLASSES, ROWS), *cases(OF_IMAGES, *IMAGES),
    *cases({"ignore_class": losses.SparseCategoricalCrossentropy(True, ignore_class=-1)}, *STEPS),
    *cases({"a sum": losses.MeanSquaredError(reduction="sum")}, ROWS, ROWS),
    *cases({"by hand": WeightedByHand(), "scalar": Scalar()}, ROWS, ROWS),
])
def test_towers_make_the_batchs_value_of_a_mean(loss, y, y_pred, float64):
    loss = resolved(loss)
    assert loss_fault(loss, y, y_pred) is None
    rounding = {"float64": 1e-12, "float32": 1e-6}  # a loss object was made before the fixture
    assert difference(loss, y, y_pred) < rounding[loss.dtype]


@pytest.mark.parametrize("loss, y, y_pred", cases(OTHERS, ROWS, ROWS))
def test_a_loss_that_is_neither_mean_nor_sum_is_found(loss, y, y_pred, float64):
    with pytest.raises(NeedsOtherTowers, match="neither a mean nor a sum over the examples"):
        check_loss(resolved(loss), y, y_pred)


KERAS_LOSSES = [
    loss for loss in vars(losses).values()
    if isinstance(loss, type) and issubclass(loss, losses.Loss)
    and loss not in (losses.Loss, losses.Dice, losses.Tversky, losses.Circle, losses.CTC,
                     losses.CategoricalGeneralizedCrossEntropy,
                     losses.SparseCategoricalCrossentropy)
]


@pytest.mark.parametrize("reduction", [r for r in REDUCTIONS if r != "mean"])
def test_keras_losses_are_means_and_sums_with_weights_too(reduction):
    for loss in KERAS_LOSSES:
        assert loss_fault(loss(reduction=reduction), ROWS, ROWS, CLASSES) is None, loss
    for loss, y, y_pred in [
        (losses.CategoricalGeneralizedCrossEntropy, CLASSES, ROWS),
        (losses.SparseCategoricalCrossentropy, CLASSES, ROWS), (losses.CTC, *STEPS),
    ]:
        assert loss_fault(resolved(loss(reduction=reduction)), y, y_pred) is None, loss
    with pytest.raises(NeedsOtherTowers):
        check_loss(losses.Circle(), CLASSES, ROWS)


def test_losses_of_ragged_tensors():
    for loss in OF_RAGGED.values():
        assert loss_fault(resolved(loss), *RAGGED) is None
    for loss in NOT_OF_RAGGED.values():
        assert loss_fault(resolved(loss), *RAGGED) is not None


@pytest.mark.parametrize("loss", [WeightedByHand(), Scalar(), MEANS["a mean"]])
def test_what_is_a_mean_without_weights_may_be_none_with_them(loss):
    assert loss_fault(resolved(loss), ROWS, ROWS) is None
    assert loss_fault(resolved(loss), ROWS, ROWS, CLASSES) is not None


def test_labels_of_a_wrong_form_are_told_by_keras_own_loss_or_by_their_shape():
    losses = keras.losses
    with pytest.raises(ValueError, match="^Arguments `target` and `output` must have the same"):
        check_loss(losses.CategoricalCrossentropy(), CLASSES, ROWS)
    with pytest.raises(NeedsOtherTowers, match=r"\(labels \(None,\), outputs \(None, 3\)\)"):
        check_loss(losses.MeanSquaredError(), CLASSES, ROWS)


def test_what_cannot_be_traced_alone_needs_the_rows_of_all_towers():
    def refuses(y, y_pred):
        raise RuntimeError("not here")

    with pytest.raises(NeedsOtherTowers, match="traced alone .RuntimeError: not here"):
        check_loss(resolved(refuses), ROWS, ROWS)
