"""Sample weights of labels, beside every kind of examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.app.datasets.batches import load_examples, shuffled_batches
from towers.app.datasets.tf_data import Streamed
from towers.app.datasets.weighting import weighed

X, Y = np.arange(10, dtype=np.float32)[:, None], np.array([0, 1, 2, 1, 1, 0, 2, 1, 1, 1], np.int32)
TEXT = "1:5,2:0.25"
COUNTED = np.array([1, 5, 0.25], np.float32)  # of class 0, 1, 2
ONE_HOT = np.eye(3, dtype=np.float32)[Y]


def model(outputs=3):
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(outputs)])


def examples(split):
    split = split() if callable(split) else split
    return load_examples(split)


def tf_data():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def streamed():
    return Streamed(tf_data(), "stream", 10)


@pytest.mark.parametrize("split", [
    (X, Y), (X, Y[:, None]), (X, ONE_HOT), (X, Y.astype(np.float32)), tf_data, streamed,
])
def test_each_example_counts_what_its_class_does(split):
    found, notes = weighed(examples(split), TEXT, model(), 3)
    batches = list(shuffled_batches(found, 4, seed=0, epoch=0))
    assert notes == ["class weights: 1: 5, 2: 0.25"]
    assert [len(batch[0]) for batch in batches] == [4, 4, 2]
    for x, _, weights in batches:
        np.testing.assert_array_equal(weights, COUNTED[Y[x.numpy()[:, 0].astype(int)]])


def test_classes_of_both_ends_without_a_weight_count_once():
    found, _ = weighed(examples((X, Y - 1)), "0:7", model(1), None)  # classes -1, 0 and 1
    (batch,) = shuffled_batches(found, 10, seed=0, epoch=0)
    np.testing.assert_array_equal(batch[2], np.where(batch[1] == 0, 7, 1))


@pytest.mark.parametrize("split", [(X, Y), (X, ONE_HOT), tf_data])
def test_balanced_counts_the_labels(split):
    found, _ = weighed(examples(split), "balanced", model(), 3)
    (batch,) = shuffled_batches(found, 10, seed=0, epoch=0)
    x, weights = batch[0].numpy()[:, 0].astype(int), batch[2].numpy()
    np.testing.assert_allclose([weights[Y[x] == c].sum() for c in range(3)], 10 / 3, rtol=1e-6)


@pytest.mark.parametrize("split, text, outputs, message", [
    ((X, Y), "3:1", 3, r"class_weight \(3:1\) names class 3, and the classes are 0 to 2\."),
    ((X, Y, np.ones(10, np.float32)), TEXT, 3, "beside data that bring sample weights"),
    ((X,), TEXT, 3, "needs one class an example"),
    ((X, {"a": Y}), TEXT, 3, "needs one class an example"),
    ((X, np.stack([Y, Y], 1)), TEXT, 3, "needs one class an example"),  # classes of two tokens
    ((X, ONE_HOT[:, None]), TEXT, 3, "needs one class an example"),
    (streamed, "balanced", 3, "give the weight of each class, such as"),
])
def test_what_is_not_one_class_an_example_is_refused(split, text, outputs, message):
    with pytest.raises(ValueError, match=message):
        weighed(examples(split), text, model(outputs), None)
