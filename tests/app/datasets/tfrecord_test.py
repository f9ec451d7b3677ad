"""TFRecord files: counted without reading them, streamed file by file, parsed by the user."""

import pytest
import tensorflow as tf

from tests.loading import refusal
from towers.app import datasets
from towers.app.datasets import batches as input_lib
from towers.app.datasets import tfrecord
from towers.resume.source import Epoch, InputOptions

NUM_CLASSES = 3
COUNTS = (5, 1, 7)


def parse(record):
    """A record holds a number."""
    number = tf.strings.to_number(record)
    return number[tf.newaxis], tf.cast(number, tf.int32) % NUM_CLASSES


def shapeless(record):
    return tf.strings.to_number(tf.strings.split(record)), 0


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """Three files to train on, of numbers from 0 on, and one to test on."""
    numbers = iter(range(sum(COUNTS) + 2))
    for name, count in zip(("train/a", "train/b", "train/c", "val/a"), (*COUNTS, 2), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(f"{tmp_path}/{name}.tfrecord") as file:
            for _ in range(count):
                file.write(str(next(numbers)))
    return tmp_path


def load(folder, features="tests.app.datasets.tfrecord_test:parse"):
    return datasets.load(
        "tfrecord", str(folder), input_shape=(), num_classes=1, features=features
    )


def numbers(examples, **place):
    batches = input_lib.shuffled_batches(examples, 4, **{"seed": 0, "epoch": 0, **place})
    return [x.numpy()[:, 0].astype(int).tolist() for x, _ in batches]


def test_records_are_counted_parsed_and_met_once_an_epoch(folder):
    dataset = load(folder)
    assert (dataset.input_shape, dataset.num_classes) == ((1,), NUM_CLASSES)
    assert [datasets.num_examples(split) for split in (dataset.train, dataset.test)] == [13, 2]
    examples = input_lib.load_examples(dataset.train, InputOptions(shuffle_buffer=1))
    orders = [sum(numbers(examples, epoch=epoch), []) for epoch in range(4)]
    assert [sorted(order) for order in orders] == [list(range(13))] * 4
    assert len({tuple(order) for order in orders}) > 1  # the files' order
    assert numbers(examples, start_step=2) == numbers(examples)[2:]


def test_a_records_index_is_its_place_in_all_files_whatever_their_order(folder):
    records = load(folder).train.ordered(Epoch(1, order=lambda count: lambda places: places[::-1]))
    found = [(int(index), int(record.numpy())) for index, record in records]
    assert found[0] == (6, 6) and all(index == number for index, number in found)


def test_the_digest_follows_names_and_sizes_and_not_the_place(folder):
    def digest(path):
        return input_lib.digest(input_lib.load_examples(load(path).train))

    before = digest(folder)
    moved = folder.rename(folder.with_name("moved"))
    assert digest(moved) == before
    with tf.io.TFRecordWriter(f"{moved}/train/b.tfrecord") as file:
        file.write("12345")
    assert digest(moved) != before


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_files_give_the_batches_of_plain_ones(folder, compression):
    places = {}, {"epoch": 1, "start_step": 1}
    expected = [numbers(input_lib.load_examples(load(folder).train), **place) for place in places]
    for path in folder.glob("*/[bc].tfrecord"):  # file a stays as it is
        records = list(tf.data.TFRecordDataset(str(path)))
        with tf.io.TFRecordWriter(str(path), compression) as file:
            for record in records:
                file.write(record.numpy())
    compressed = load(folder).train
    assert compressed.num_examples == sum(COUNTS)
    examples = input_lib.load_examples(compressed)
    assert [numbers(examples, **place) for place in places] == expected
    (folder / "train" / "a.tfrecord.gz").write_bytes((folder / "train/a.tfrecord").read_bytes())
    assert "train/a.tfrecord and train/a.tfrecord.gz, which would count" in refusal(load, folder)
    (folder / "train" / "a.tfrecord.gz").unlink()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert refusal(load, folder).startswith(f"{path} ({compression}) is damaged: ")


@pytest.mark.parametrize("cut", [1, 9, 14])
def test_a_truncated_file_is_refused_with_its_name(folder, cut):
    path = folder / "train" / "b.tfrecord"
    path.write_bytes(path.read_bytes()[:-cut])
    message = refusal(tfrecord.count_records, str(path))
    assert message == f"{path} ends within record 0; copy it again."


@pytest.mark.parametrize(("features", "message"), [
    (None, "needs features="),
    ("tests.app.datasets.tfrecord_test:shapeless", "x has an unknown shape"),
    ("tests.app.datasets.tfrecord_test:load", "cannot parse a record into (x, y): "),
])
def test_what_parses_no_record_is_refused(folder, features, message):
    assert message in refusal(load, folder, features)


def test_a_flipped_byte_is_named_when_its_turn_comes(folder):
    path = folder / "train" / "c.tfrecord"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    examples = input_lib.load_examples(load(folder).train)
    message = refusal(list, input_lib.shuffled_batches(examples, 4, 0, 0))
    assert message.startswith(f"{folder} (train): example 12 cannot be read: corrupted record")
