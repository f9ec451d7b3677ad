"""A tf.data.Dataset that memory does not hold: an order of seed and epoch alone, from any step."""

import itertools
import os
import re
import signal

import numpy as np
import pytest
import tensorflow as tf

from tests.loading import refusal
from towers.resume.epoch import Epoch
from towers.app.datasets import batches as input_lib, dataset, tf_data, user
from towers.app.datasets.tf_data import Cached, Streamed
from towers.app.datasets.user import from_splits, num_examples
from towers.machine import terminal
from towers.app.config import TrainConfig

COUNT, BATCH, BUFFER = 23, 5, 6


@pytest.fixture(autouse=True)
def _without_room(monkeypatch):
    """For 23 examples of 8 bytes; but for 6 of them."""
    for module in (dataset, tf_data):
        monkeypatch.setattr(module, "usable_memory", lambda: 4 * 8 * BUFFER)


def pairs(count=COUNT):
    x = np.arange(count, dtype=np.float32)[:, np.newaxis]
    return tf.data.Dataset.from_tensor_slices((x, np.arange(count, dtype=np.int32) % 3))


def order(split=None, **place):
    options = TrainConfig(shuffle_buffer=BUFFER)
    examples = input_lib.load_examples(split or pairs(), options)
    batches = examples.batches(Epoch(BATCH, **{"seed": 0, "number": 0, **place}))
    return [x.numpy()[:, 0].tolist() for x, _ in batches]


def test_what_fits_into_a_share_of_the_memory_is_kept_there(monkeypatch):
    def kind(split):
        monkeypatch.setattr(dataset, "usable_memory", lambda: 4 * 8 * COUNT)
        return type(user.source_of(split))

    assert (kind(pairs()), kind(pairs(COUNT + 1))) == (Cached, Streamed)
    unknown = pairs().map(lambda x, y: (tf.strings.as_string(x), y))
    assert kind(unknown) is Streamed


def test_an_epoch_reads_from_memory_what_another_has_read(monkeypatch):
    monkeypatch.setattr(tf_data, "fits", lambda num_bytes: True)
    passes = []

    def elements():
        passes.append(1)
        yield from (([float(i)], i % 3) for i in range(COUNT))

    examples = input_lib.load_examples(generated(elements))
    for epoch in range(3):
        batches = examples.batches(Epoch(BATCH, 0, epoch))
        assert sum(len(x) for x, _ in batches) == COUNT
    assert len(passes) == 2  # the first one counts


def test_a_shuffle_buffer_larger_than_the_share_is_refused_with_the_largest():
    message = refusal(input_lib.load_examples, pairs(), TrainConfig(shuffle_buffer=7))
    assert message.startswith("shuffle_buffer (7): so many examples of 8 bytes take more than 25%")
    assert "use at most shuffle_buffer=6." in message
    assert input_lib.load_examples(pairs(6), TrainConfig(shuffle_buffer=6))


def test_an_example_that_cannot_be_read_is_named_by_its_index():
    broken = pairs().map(lambda x, y: (tf.debugging.check_numerics(1 / (x - 9), "no value"), y))
    message = refusal(order, broken)
    assert message.startswith("the tf.data.Dataset: example 9 cannot be read: no value")


def test_fewer_examples_than_at_the_start_are_refused_and_more_are_left():
    fewer, more = (Streamed(pairs(COUNT + n), "here", COUNT) for n in (-2, 9))
    message = refusal(order, fewer)
    assert message.startswith("here: 21 examples now, 23 at the start.")
    assert len(sum(order(more), [])) == COUNT


def test_the_digest_tells_streamed_from_cached(monkeypatch):
    def digest():
        options = TrainConfig(shuffle_buffer=BUFFER)
        return input_lib.digest(input_lib.load_examples(pairs(), options))

    first = digest()
    assert digest() == first
    monkeypatch.setattr(tf_data, "fits", lambda num_bytes: True)
    assert digest() != first


def generated(elements):
    """A tf.data.Dataset that does not know its length, of a generator function."""
    specs = (tf.TensorSpec([1]), tf.TensorSpec([], tf.int32))
    return tf.data.Dataset.from_generator(elements, output_signature=specs)


def test_what_only_reading_tells_is_read_once_and_lines_say_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0)
    passes = []

    def elements():
        passes.append(1)
        yield from (([float(i)], i % 3) for i in range(40))

    split = from_splits("mine", generated(elements), pairs(4))
    assert (split.num_classes, num_examples(split.train)) == (3, 40)
    assert len(passes) == 1
    lines = capsys.readouterr().err.splitlines()
    counting = "counting the examples and classes of mine (train):"
    assert re.match(rf"{re.escape(counting)} \d+ in \d+ s; if", lines[0])
    assert any(re.search(": 40 in [0-9]+ s", line) for line in lines)
    own = from_splits("mine", generated(elements), None, custom_loss=True)
    assert own.train.element_spec == pairs().element_spec
    assert len(passes) == 2


@pytest.mark.parametrize("custom_loss", [False, True])
def test_ctrl_c_ends_the_count_of_what_has_no_end(custom_loss):
    def elements():
        for i in itertools.count():
            if i == 20:
                os.kill(os.getpid(), signal.SIGINT)
            yield [0.0], 0

    with pytest.raises(KeyboardInterrupt):
        from_splits("mine", generated(elements), pairs(), custom_loss=custom_loss)
