"""Arrays of any kind of number -> float32 and int32; what is no data set is refused."""

import numpy as np
import pytest

from tests.loading import refusal
from towers.app.datasets.arrays import from_arrays

WHERE = ("train.bin", "test.bin")


def test_uint8_images_are_scaled_and_other_numbers_keep_their_values():
    y = np.array([0, 1])
    for dtype, wanted in ((np.uint8, 1.0), (np.int64, 255.0), (np.float64, 255.0)):
        x = np.array([[[0]], [[255]]], dtype)
        dataset = from_arrays("a", (x, y), (x, y), WHERE)
        assert dataset.train[0].dtype == np.float32
        assert dataset.train[0].tolist() == [[[0]], [[wanted]]]


def test_labels_of_shape_n_by_1_are_taken_and_counted_over_both_splits():
    x = np.zeros((2, 3), np.float32)
    dataset = from_arrays("a", (x, [[0], [1]]), (x, [[0], [6]]), WHERE)
    assert dataset.num_classes == 7 and dataset.test[1].tolist() == [0, 6]
    assert dataset.train[1].dtype == np.int32


GOOD = (np.zeros((3, 2), np.float32), np.array([0, 1, 1]))


@pytest.mark.parametrize(
    "x, y, words",
    [
        (GOOD[0], GOOD[1][:2], "3 examples, but 2 labels"),
        (GOOD[0][:0], GOOD[1][:0], "no examples"),
        (GOOD[0], GOOD[1].astype(float), "labels are float64"),
        (GOOD[0], np.array([0, -1, 0]), "label -1 of example 1"),
        (GOOD[0], np.array([0, 0, 2**40]), "of example 2 is out of range"),
        (GOOD[0], np.eye(3, dtype=int), "argmax"),
        (GOOD[1], GOOD[1], "x has shape (3,)"),
        (np.array([["a"]] * 3), GOOD[1], "x has dtype <U1"),
        (np.array([[None]] * 3), GOOD[1], "x has dtype object"),
        ([[1], [2, 3], [4]], GOOD[1], "x (list) is no array"),
        (np.full((3, 2), 1e300), GOOD[1], "example 0 holds inf"),
    ],
)
@pytest.mark.parametrize("split", [0, 1])
def test_bad_arrays_are_refused_naming_their_source(x, y, words, split):
    splits = [(x, y), GOOD] if split == 0 else [GOOD, (x, y)]
    message = refusal(from_arrays, "a", *splits, WHERE)
    assert words in message and message.startswith(WHERE[split])
