"""Arrays of any kind: what they become, and what is refused in which words."""

import numpy as np
import pytest
import tensorflow as tf

from tests.loading import refusal
from towers.app.datasets.dataset import check_arrays
from towers.app.datasets.user import from_splits

A = np.arange(12, dtype="float64").reshape(4, 3)
GOOD = (np.zeros((3, 2), np.float32), np.array([0, 1, 1]))


def of_custom_loss(train, test=None):
    return from_splits("mine", train, test, custom_loss=True)


def split(value):
    return of_custom_loss(value).train


def test_labels_of_shape_n_by_1_are_taken_and_counted_over_both_splits():
    x = np.zeros((2, 3))
    dataset = from_splits("a", (x, [[0], [1]]), (x, [[0], [6]]))
    assert dataset.num_classes == 7 and dataset.test[1].tolist() == [0, 6]
    assert dataset.train[1].dtype == np.int32 and dataset.train[0].dtype == np.float32


@pytest.mark.parametrize("x, y, words", [
    (GOOD[0], GOOD[1][:2], "3 examples, but 2 labels"),
    (GOOD[0][:0], GOOD[1][:0], "no examples"),
    (GOOD[0], GOOD[1].astype(float), "labels are float64"),
    (GOOD[0], np.array([0, -1, 0]), "label -1 of example 1"),
    (GOOD[0], np.array([0, 0, 2**40]), "of example 2 is out of range"),
    (GOOD[0], np.eye(3, dtype=int), "argmax"),
    (GOOD[1], GOOD[1], "x has shape (3,)"),
    (np.zeros((3, 0)), GOOD[1], "x has shape (3, 0)"),
    (np.array([["a"]] * 3), GOOD[1], "x has dtype <U1"),
    (np.array([[None]] * 3), GOOD[1], "x has dtype object"),
    ([[1], [2, 3], [4]], GOOD[1], "x (list) is no array"),
    (np.full((3, 2), 1e300), GOOD[1], "example 0 holds inf"),
])
@pytest.mark.parametrize("place", [0, 1])
def test_arrays_that_are_no_classes_are_an_error_that_names_the_split(x, y, words, place):
    splits = [(x, y), GOOD] if place == 0 else [GOOD, (x, y)]
    message = refusal(from_splits, "a", *splits)
    assert words in message and message.startswith(("a (train): ", "a (test): ")[place])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_with_their_first_index(value):
    x = np.zeros((7, 3, 2), np.float32)
    x[5, 2, 1] = x[6, 0, 0] = value
    message = refusal(check_arrays, x, np.zeros(7, int), 1, "file.npz")
    assert message.startswith("file.npz: example 5 ")
    assert str(value) in message and "x[5, 2, 1]" in message


# Of any structure


def test_floats_become_keras_floats_and_all_else_stays():
    x = {"a": A, "b": np.arange(4, dtype="uint8"), "c": np.array([True, False, True, False])}
    found, y = split((x, np.arange(4, dtype="int64")))
    assert {k: v.dtype.name for k, v in found.items()} == {
        "a": "float32", "b": "uint8", "c": "bool"
    }
    assert y.dtype == np.int64
    np.testing.assert_array_equal(found["a"], A)


def test_a_list_of_arrays_is_several_inputs_and_a_list_of_numbers_one():
    ((a, b), y) = split(([A, A + 1], [1.0, 2.0, 3.0, 4.0]))
    np.testing.assert_array_equal(b, a + 1)
    assert y.shape == (4,)
    (x,) = split(([[1, 2], [3, 4]],))
    assert x.shape == (2, 2)


def test_a_data_set_knows_the_shape_of_an_example_and_no_classes():
    dataset = of_custom_loss((A, A), (A[:1], A[:1]))
    assert (dataset.input_shape, dataset.num_classes, len(dataset.test[0])) == ((3,), None, 1)
    assert of_custom_loss({"a": A}).input_shape == {"a": (3,)}
    assert len(split(A)) == len(split((A,))) == len(split((A, None))) == 1
    assert [part.shape for part in split((A, A, np.ones(4)))] == [(4, 3), (4, 3), (4,)]


@pytest.mark.parametrize(("value", "message"), [
    (({"a": A}, A[:3]), r"parts differ in length: x\['a'\] 4, y 3 examples"),
    (A[:0], "no examples; give at least one"),
    (({"a": np.array(["x"] * 4)}, A), r"x\['a'\] has dtype <U1.*TextVectorization"),
    ((A, [[1], [1, 2], [3], [4]]), r"y \(list\) is no array .*: pad its rows .* tf.Ragged"),
    ((A, 3.0), "y is one number, but must be"),
    ((A, np.where(A > 10, np.nan, A)), r"example 3 holds nan \(at y\[3, 2\]\)"),
    ((A, None, np.ones(4)), "sample weights need y"),
])
def test_what_is_no_such_data_is_refused_in_one_line(value, message):
    with pytest.raises(ValueError, match=rf"mine \(train\): .*{message}") as error:
        split(value)
    assert "\n" not in str(error.value)


def test_train_and_test_have_one_shape():
    with pytest.raises(ValueError, match=r"mine \(test\): examples have shapes \(2,\) and \(3,\)"):
        of_custom_loss((A, A), (A[:, :2], A))
    of_custom_loss((A, A, np.ones(4)), (A, A))  # validation may be without weights


def test_a_tf_data_dataset_of_structures_stays_as_it_is():
    dataset = tf.data.Dataset.from_tensor_slices(({"a": A}, A))
    assert of_custom_loss(dataset, dataset).train is dataset
    for wrong in (tf.data.Dataset.range(3).window(2), tf.data.Dataset.from_tensors("text")):
        with pytest.raises(ValueError, match=r"mine \(train\): .* numbers: dense, ragged or spars"):
            of_custom_loss(wrong)
