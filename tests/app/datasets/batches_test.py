"""The order of the examples is a function of the seed and the epoch; sample weights of labels."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.app.datasets.sources import Rows
from tests.loading import in_each_form
from towers.app.config import TrainConfig
from towers.app.datasets import batches as input_lib
from towers.app.datasets.batches import load_examples
from towers.resume.epoch import Epoch
from towers.app.datasets.tf_data import Streamed
from towers.app.datasets.weighting import weighed

NUM_EXAMPLES, BUFFER = 103, 20
# What has an index has one order in every form.
INDEXED = ["arrays", "image files", "a source", "a source of 2 processes"]


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The same examples in each form: two pixels as bright as the label."""
    rows = Rows([(np.full((1, 2, 1), label, np.uint8), label) for label in range(NUM_EXAMPLES)])
    splits = in_each_form(rows, NUM_EXAMPLES, tmp_path_factory.mktemp("images"))
    splits["streamed"] = Streamed(splits["tf.data"], "here", NUM_EXAMPLES)
    options = TrainConfig(shuffle_buffer=BUFFER)
    forms = {name: input_lib.load_examples(split, options) for name, split in splits.items()}
    by_processes = input_lib.load_examples(
        splits["a source"], TrainConfig(shuffle_buffer=BUFFER, data_workers=2)
    )
    return forms | {"a source of 2 processes": by_processes}


def order(examples, **arguments):
    batches = examples.batches(Epoch(**{"batch_size": 10, "seed": 0, "number": 0, **arguments}))
    labels = []
    for x, y in batches:
        np.testing.assert_array_equal(np.rint(255 * x[:, 0, 1, 0]), y)  # they stay together
        labels.append(y.numpy().tolist())
    return labels


@pytest.fixture(name="examples", params=["arrays", "tf.data", "streamed"])
def _examples(request, forms):
    return forms[request.param]


def test_an_epoch_holds_every_example_once_and_ends_with_a_partial_batch(examples):
    batches = order(examples)
    assert [len(batch) for batch in batches] == [10] * 10 + [3]
    assert sorted(sum(batches, [])) == list(range(NUM_EXAMPLES)) != sum(batches, [])


def test_the_same_seed_and_epoch_give_the_same_order_and_others_do_not(examples):
    first = order(examples, number=1, seed=3)
    assert order(examples, number=1, seed=3) == first
    assert order(examples, number=2, seed=3) != first
    assert order(examples, number=1, seed=2**32 - 1) != first
    assert order(examples, number=3, seed=1) != first


def test_an_epoch_resumes_from_any_step_in_an_order_that_no_batch_size_changes(examples):
    whole = order(examples, number=5)
    for start_step in (1, 7, 11):
        assert order(examples, number=5, start_step=start_step) == whole[start_step:]
    assert sum(order(examples, number=5, batch_size=7), []) == sum(whole, [])


@pytest.mark.parametrize("form", ["image files", "a source"])
def test_evaluation_takes_the_examples_as_they_come(forms, form):
    batches = [y.numpy().tolist() for _, y in forms[form].batches(Epoch(50))]
    assert batches == [list(range(50)), list(range(50, 100)), [100, 101, 102]]


@pytest.mark.parametrize("form", INDEXED[1:])
def test_the_bits_of_examples_with_an_index_are_those_of_arrays(forms, form):
    def bits(examples):
        batches = examples.batches(Epoch(10, 1, 2, start_step=3))
        return [[(t.dtype, t.shape, t.numpy().tobytes()) for t in batch] for batch in batches]

    assert bits(forms[form]) == bits(forms["arrays"])
    assert str(forms[form].specs) == str(forms["arrays"].specs)


def test_what_is_streamed_stays_near_where_it_was(forms):
    places = sum(order(forms["streamed"]), [])
    assert all(place > index - BUFFER for place, index in enumerate(places))


# Sample weights of labels, beside every kind of examples
X, Y = np.arange(10, dtype=np.float32)[:, None], np.array([0, 1, 2, 1, 1, 0, 2, 1, 1, 1], np.int32)
TEXT = "1:5,2:0.25"
COUNTED = np.array([1, 5, 0.25], np.float32)  # of class 0, 1, 2
ONE_HOT = np.eye(3, dtype=np.float32)[Y]


def model(outputs=3):
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(outputs)])


def examples(split):
    return load_examples(split() if callable(split) else split)


def tf_data():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def streamed():
    return Streamed(tf_data(), "stream", 10)


@pytest.mark.parametrize(
    "split",
    [
        (X, Y),
        (X, Y[:, None]),
        (X, ONE_HOT),
        tf_data,
        streamed,
    ],
)
def test_each_example_counts_what_its_class_does(split):
    found, notes = weighed(examples(split), TEXT, model(), 3)
    batches = list(found.batches(Epoch(4, seed=0, number=0)))
    assert notes == ["class weights: 1: 5, 2: 0.25"]
    assert [len(batch[0]) for batch in batches] == [4, 4, 2]
    for x, _, weights in batches:
        np.testing.assert_array_equal(weights, COUNTED[Y[x.numpy()[:, 0].astype(int)]])


def test_classes_of_both_ends_without_a_weight_count_once():
    found, _ = weighed(examples((X, Y - 1)), "0:7", model(1), None)  # classes -1, 0 and 1
    (batch,) = found.batches(Epoch(10, seed=0, number=0))
    np.testing.assert_array_equal(batch[2], np.where(batch[1] == 0, 7, 1))


@pytest.mark.parametrize("split", [(X, ONE_HOT), tf_data])
def test_balanced_counts_the_labels(split):
    found, _ = weighed(examples(split), "balanced", model(), 3)
    (batch,) = found.batches(Epoch(10, seed=0, number=0))
    x, weights = batch[0].numpy()[:, 0].astype(int), batch[2].numpy()
    np.testing.assert_allclose([weights[Y[x] == c].sum() for c in range(3)], 10 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    "split, text, outputs, message",
    [
        ((X, Y), "3:1", 3, r"class_weight \(3:1\) names class 3, and the classes are 0 to 2\."),
        ((X, Y, np.ones(10, np.float32)), TEXT, 3, "beside data that bring sample weights"),
        ((X,), TEXT, 3, "needs one class an example"),
        ((X, np.stack([Y, Y], 1)), TEXT, 3, "needs one class an example"),  # classes of two tokens
        (streamed, "balanced", 3, "give the weight of each class, such as"),
    ],
)
def test_class_weights_of_other_labels_are_errors(split, text, outputs, message):
    with pytest.raises(ValueError, match=message):
        weighed(examples(split), text, model(outputs), None)
