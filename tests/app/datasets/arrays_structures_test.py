"""Examples of any structure: what they become, and what is refused in which words."""

import numpy as np
import pytest
import tensorflow as tf

from towers.app.datasets.user import from_splits

A = np.arange(12, dtype="float64").reshape(4, 3)


def split(value):
    return from_splits("mine", value, None).train


def test_floats_become_keras_floats_and_all_else_stays():
    x = {"a": A, "b": np.arange(4, dtype="uint8"), "c": np.array([True, False, True, False])}
    ((found, y)) = split((x, np.arange(4, dtype="int64")))
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


def test_labels_and_weights_may_be_absent():
    assert len(split(A)) == len(split((A,))) == len(split((A, None))) == 1
    assert [part.shape for part in split((A, A, np.ones(4)))] == [(4, 3), (4, 3), (4,)]


def test_a_data_set_knows_the_shape_of_an_example_and_no_classes():
    dataset = from_splits("mine", (A, A), (A[:1], A[:1]))
    assert (dataset.input_shape, dataset.num_classes, len(dataset.test[0])) == ((3,), None, 1)
    assert from_splits("mine", {"a": A}, None).input_shape == {"a": (3,)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (({"a": A}, A[:3]), r"parts differ in length: x\['a'\] 4, y 3 examples"),
        (A[:0], "no examples; give at least one"),
        (({"a": np.array(["x"] * 4)}, A), r"x\['a'\] has dtype <U1.*TextVectorization"),
        ((A, [[1], [1, 2], [3], [4]]), r"y \(list\) is no array .*: pad its rows .* tf.Ragged"),
        ((A, 3.0), "y is one number, but must be"),
        ((A, np.where(A > 10, np.nan, A)), r"example 3 holds nan \(at y\[3, 2\]\)"),
        ((A, None, np.ones(4)), "sample weights need y"),
        (np.array([{}] * 4), "x has dtype object, but must hold real numbers"),
    ],
)
def test_what_is_no_such_data_is_refused_in_one_line(value, message):
    with pytest.raises(ValueError, match=rf"mine \(train\): .*{message}") as error:
        split(value)
    assert "\n" not in str(error.value)


def test_train_and_test_have_one_shape():
    with pytest.raises(ValueError, match=r"mine \(test\): examples of shapes \(2,\) and \(3,\)"):
        from_splits("mine", (A, A), (A[:, :2], A))
    from_splits("mine", (A, A, np.ones(4)), (A, A))  # validation may be without weights


def test_a_tf_data_dataset_of_structures_stays_as_it_is():
    dataset = tf.data.Dataset.from_tensor_slices(({"a": A}, A))
    assert from_splits("mine", dataset, dataset).train is dataset
    for wrong, message in (
        (dataset.repeat(), "repeats forever"),
        (dataset.take(0), "no examples"),
        (tf.data.Dataset.range(3).window(2), "hold numbers: dense, ragged or sparse"),
        (tf.data.Dataset.from_tensors("text"), "hold numbers: dense, ragged or sparse"),
    ):
        with pytest.raises(ValueError, match=rf"mine \(train\): .*{message}"):
            from_splits("mine", wrong, None)
