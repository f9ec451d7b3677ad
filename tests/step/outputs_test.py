"""One value for each output of a model, from whatever structure it comes in."""

import keras
import pytest
import tensorflow as tf

from towers.step import outputs
from towers.step.outputs import ModelLoss

A_LIST, A_DICT = ["p", "q"], {"b": "q", "a": "p"}  # structures of outputs; dicts in sorted order


@pytest.mark.parametrize("value, structure, expected", [
    (5, "one", [5]),
    (None, A_LIST, [None, None]),
    ([5, 6], A_LIST, [5, 6]),
    ((5, 6), A_DICT, [5, 6]),
    ({"first": 5, "second": 6}, A_LIST, [5, 6]),  # by the outputs' names
    ({"second": 6}, A_LIST, [None, 6]),
    ({"a": 5, "b": 6}, A_DICT, [5, 6]),
    ({"b": 6}, A_DICT, [None, 6]),
])
def test_a_value_is_laid_beside_the_flattened_outputs(value, structure, expected):
    names = ["first", "second"] if structure is A_LIST else None
    assert outputs.per_output(value, structure, names, "y") == expected


def test_one_value_stands_for_every_output_only_where_it_may():
    assert outputs.per_output(5, A_LIST, None, "loss", repeat=True) == [5, 5]
    with pytest.raises(ValueError, match="y is one value, but the model has 2 outputs"):
        outputs.per_output(5, A_LIST, None, "y")


@pytest.mark.parametrize("value, message", [
    ([1, 2, 3], "y has 3 entries, but the model has 2 outputs"),
    ({"first": 1, "third": 3}, r"y names \['third'\]; the outputs are \['first', 'second'\]"),
])
def test_what_does_not_match_the_outputs_is_refused_with_both(value, message):
    with pytest.raises(ValueError, match=message):
        outputs.per_output(value, A_LIST, ["first", "second"], "y")


def squared_error(reduction="sum_over_batch_size"):
    return keras.losses.MeanSquaredError(reduction=reduction, dtype="float64")


def test_losses_are_resolved_from_names_functions_and_objects():
    def distance(y_true, y_pred):
        return keras.ops.sum(keras.ops.abs(y_true - y_pred), axis=-1)

    given = ["mse", distance, squared_error("sum"), None]
    resolved = outputs.resolve_losses(given, [1, 0.5, None, 3], [1, 2, 3, 4])
    assert resolved[3] is None
    assert resolved[2].loss is given[2]
    assert [each.factor for each in resolved[:3]] == [1, 0.5, 1]
    y, y_pred = tf.zeros([2, 2]), tf.constant([[1.0, 2.0], [3.0, 4.0]])
    values = [float(each.loss(y, y_pred)) for each in resolved[:3]]
    assert values == [7.5, 5.0, 15.0]  # (1+4+9+16)/4; the mean of 3 and 7; the sum of 2.5 and 12.5


def test_one_loss_is_every_outputs_and_a_models_own_is_nones():
    one, other = outputs.resolve_losses("mse", None, [1, 2])
    y, y_pred = tf.zeros([2, 2]), tf.constant([[1.0, 2.0], [3.0, 4.0]])
    assert [float(each.loss(y, y_pred)) for each in (one, other)] == [7.5, 7.5]
    assert outputs.resolve_losses(ModelLoss(print), None, [1, 2]) == [None, None]


@pytest.mark.parametrize("reduction", [None, "none"])
def test_a_loss_that_is_no_one_number_is_refused(reduction):
    with pytest.raises(ValueError, match="must be one number. Use one of sum_over_batch_size"):
        outputs.resolve_losses(squared_error(reduction), None, "one")
