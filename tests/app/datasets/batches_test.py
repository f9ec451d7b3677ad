"""The order of the examples is a function of the seed and the epoch, whatever the step."""

import numpy as np
import pytest
import tensorflow as tf

from towers.app.datasets import batches as input_lib
from towers.app.datasets.image_files import ImageFiles

NUM_EXAMPLES = 103


@pytest.fixture(name="splits", scope="module")
def _splits(tmp_path_factory):
    """The same examples in each form: two pixels as bright as the label."""
    y = np.arange(NUM_EXAMPLES, dtype=np.int32)
    pixels = np.repeat(y, 2).reshape(NUM_EXAMPLES, 1, 2, 1).astype(np.uint8)
    x = pixels / np.float32(255)
    directory = tmp_path_factory.mktemp("images")
    names = [f"{label}.png" for label in y]
    for name, image in zip(names, pixels, strict=True):
        (directory / name).write_bytes(tf.io.encode_png(image).numpy())
    return {
        "arrays": (x, y),
        "tf.data": tf.data.Dataset.from_tensor_slices((x, y)),
        "image files": ImageFiles(directory, names, y, (1, 2, 1)),
    }


def order(examples, **arguments):
    batches = input_lib.shuffled_batches(examples, **{"batch_size": 10, "seed": 0, **arguments})
    return [y.numpy().tolist() for _, y in batches]


@pytest.fixture(params=["arrays", "tf.data", "image files"])
def examples(request, splits):
    return input_lib.load_examples(splits[request.param])


def test_an_epoch_holds_every_example_once_and_ends_with_a_partial_batch(examples):
    batches = order(examples, epoch=0)
    assert [len(batch) for batch in batches] == [10] * 10 + [3]
    assert sorted(sum(batches, [])) == list(range(NUM_EXAMPLES))
    assert sum(batches, []) != list(range(NUM_EXAMPLES))


def test_the_same_seed_and_epoch_give_the_same_order_and_others_do_not(examples):
    first = order(examples, epoch=1, seed=3)
    assert order(examples, epoch=1, seed=3) == first
    assert order(examples, epoch=2, seed=3) != first
    assert order(examples, epoch=1, seed=4) != first
    assert order(examples, epoch=3, seed=1) != first


@pytest.mark.parametrize("start_step", [1, 7, 10, 11])
def test_an_epoch_that_starts_later_goes_on_with_the_same_batches(examples, start_step):
    assert order(examples, epoch=5, start_step=start_step) == order(examples, epoch=5)[start_step:]


def test_examples_and_labels_stay_together(examples):
    for x, y in input_lib.shuffled_batches(examples, 10, seed=0, epoch=0):
        np.testing.assert_array_equal(np.rint(255 * x[:, 0, 1, 0]), y)


def test_the_order_does_not_depend_on_the_batch_size(examples):
    one = sum(order(examples, epoch=0, batch_size=7), [])
    assert one == sum(order(examples, epoch=0, batch_size=64), [])


def test_evaluation_takes_the_examples_as_they_come(examples):
    batches = [y.numpy().tolist() for _, y in input_lib.ordered_batches(examples, 50)]
    assert batches == [list(range(50)), list(range(50, 100)), [100, 101, 102]]
