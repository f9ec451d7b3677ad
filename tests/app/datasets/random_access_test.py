"""A random-access source: structures, errors, and runs on it."""

import numpy as np
import pytest
import tensorflow as tf

from tests.app.datasets.sources import NUM_CLASSES, Pixels, Rows
from tests.loading import refusal
from towers.resume.epoch import Epoch
from towers.app.datasets import batches as input_lib
from towers.app.datasets.random_access import split_of
from towers.app.config import TrainConfig

COUNT, BATCH = 23, 5


def read_examples(examples=None, **options):
    split, *_ = split_of(examples or Pixels(COUNT), "here", NUM_CLASSES, custom_loss=False)
    return input_lib.load_examples(split, TrainConfig(**options))


def test_structures_keep_their_names_and_64_bit_numbers_become_32_bit_ones():
    rows = Rows([({"b": index, "a": ([1.0, 2.0],)}, (0.5, index)) for index in range(4)])
    split, *_ = split_of(rows, "here", None, custom_loss=False)
    assert [leaf.path for leaf in split.source.leaves] == ["x['a'][0]", "x['b']", "y[0]", "y[1]"]
    ((x, y),) = input_lib.load_examples(split).batches(Epoch(4))
    assert x["b"].numpy().tolist() == y[1].numpy().tolist() == [0, 1, 2, 3]
    assert x["a"][0].shape == (4, 2) and list(x) == ["b", "a"]
    dtypes = {part.dtype for part in tf.nest.flatten((x, y))}
    assert dtypes == {tf.float32, tf.int32}


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "here: no examples"),
        ([(np.zeros(2), 1)], "here: y is a label, .* add NUM_CLASSES = N beside"),
        ([7], "here: example 0 is a int"),
    ],
)
def test_other_objects_than_sources_of_examples_are_errors(rows, message):
    with pytest.raises(ValueError, match=message):
        split_of(Rows(rows), "here", None, custom_loss=False)


def test_a_fault_in_training_is_raised_as_one_line_with_the_index():
    examples = read_examples(Pixels(COUNT, raises=11))
    message = "here: example 11 cannot be read: KeyError: 'no such row' (sources.py:23)."
    assert message in refusal(list, examples.batches(Epoch(BATCH, 0, 0)))


def test_a_source_that_changes_its_length_is_an_error_in_the_next_epoch():
    examples = read_examples()
    assert len(list(examples.batches(Epoch(BATCH, 0, 0)))) == 5
    examples.source.source.examples.count = 22
    message = refusal(list, examples.batches(Epoch(BATCH, 0, 1)))
    assert message.startswith("here: 22 examples now, 23 at the start.")


def test_the_digest_is_of_shapes_and_size():
    digests = [
        input_lib.digest(read_examples(Pixels(*what)))
        for what in ((COUNT,), (COUNT,), (COUNT + 1,), (COUNT, (3, 2, 1)))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3
