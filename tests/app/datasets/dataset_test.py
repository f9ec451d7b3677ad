"""What every data set must satisfy, and how many examples a split holds."""

import numpy as np
import pytest
import tensorflow as tf

from tests.loading import refusal
from towers.app.datasets.dataset import check_arrays
from towers.app.datasets.image_files import ImageFiles
from towers.app.datasets.user import num_examples


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_with_their_first_index(value, monkeypatch):
    monkeypatch.setattr("towers.app.datasets.dataset._VALUES_AT_ONCE", 12)  # 2 examples at once
    x = np.zeros((7, 3, 2), np.float32)
    x[5, 2, 1] = x[6, 0, 0] = value
    message = refusal(check_arrays, x, np.zeros(7, int), 1, "file.npz")
    assert message.startswith("file.npz: example 5 ")
    assert str(value) in message and "x[5, 2, 1]" in message


def test_all_labels_and_finite_examples_are_accepted():
    check_arrays(np.zeros((3, 2), np.float32), np.array([0, 1, 2]), 3, "here")
    check_arrays(np.zeros((1, 2), np.int32), np.array([0]), 1, "here")


@pytest.mark.parametrize("x, y, message", [
    (np.zeros(3), np.zeros(3, int), "here: x has shape (3,), but must be [N, ...]"),
    (np.zeros((3, 0)), np.zeros(3, int), "here: x has shape (3, 0)"),
    (np.zeros((3, 2)), np.zeros((3, 2), int), "here: labels have shape (3, 2)"),
    (np.zeros((3, 2)), np.zeros(2, int), "here: 3 examples, but 2 labels"),
    (np.zeros((0, 2)), np.zeros(0, int), "here: no examples"),
    (np.zeros((3, 2)), np.zeros(3), "here: labels are float64"),
    (np.zeros((3, 2)), np.array([0, 3, 5]), "here: label 3 of example 1 is out of range; labels "
     "must lie in 0 to 2."),
    (np.zeros((3, 2)), np.array([0, 0, -1]), "here: label -1 of example 2"),
])
def test_what_is_no_split_is_refused_naming_where_it_comes_from(x, y, message):
    assert message in refusal(check_arrays, x, y, 3, "here")


def test_the_examples_of_any_kind_of_split_are_counted(tmp_path):
    def numbers():
        yield from range(5)

    unknown = tf.data.Dataset.from_generator(
        numbers, output_signature=tf.TensorSpec([], tf.int32)
    ).map(lambda n: (n, n))
    assert num_examples((np.zeros((3, 2)), np.zeros(3, int))) == 3
    assert num_examples(tf.data.Dataset.range(4).map(lambda n: (n, n))) == 4
    assert num_examples(unknown) == 5
    files = ImageFiles(tmp_path, ["a.png"] * 7, np.zeros(7, np.int32), (2, 2, 3))
    assert num_examples(files) == 7


def test_a_split_without_an_end_is_refused():
    assert "repeats forever" in refusal(num_examples, tf.data.Dataset.range(4).repeat())
