"""Which files of a directory train, which test, and what parses their records."""

import pytest
import tensorflow as tf

from tests.app.datasets.sources import write_records
from tests.loading import refusal
from towers.app import datasets
from towers.app.datasets import batches as input_lib, record_files
from towers.app.config import TrainConfig
from towers.resume.epoch import Epoch

ME = "tests.app.datasets.record_files_test"
NUM_CLASSES = 3
COUNTS = (5, 1, 7)


def load(folder, features=f"{ME}:parse", name="tfrecord"):
    return datasets.load(name, str(folder), input_shape=(), num_classes=1, features=features)


@pytest.mark.parametrize(
    "names, train, test",
    [
        (
            ["train/b.tfrecord", "train/a.tfrecord", "val/c.tfrecord", "test/d.tfrecord"],
            ["train/a.tfrecord", "train/b.tfrecord"],
            ["val/c.tfrecord"],
        ),
        (
            [
                "cats-train.tfrecord-00000-of-00002",
                "cats-train.tfrecord-00001-of-00002",
                "cats-test.tfrecord-00000-of-00001",
                "trainer.tfrecord",
                "README",
            ],
            ["cats-train.tfrecord-00000-of-00002", "cats-train.tfrecord-00001-of-00002"],
            ["cats-test.tfrecord-00000-of-00001"],
        ),
    ],
)
def test_folders_or_names_say_what_a_file_is_for(tmp_path, names, train, test):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert record_files.find("tfrecord", str(tmp_path)) == (train, test)


def test_no_directory_or_no_files_are_refused_with_the_forms(tmp_path):
    (tmp_path / "train.tfrecord").write_bytes(b"")
    for data_dir, message in (
        (None, "dataset=tfrecord needs data_dir=DIR, with DIR/train/*"),
        (str(tmp_path / "no"), "holds 0 *.tfrecord* files, and none for train"),
        (str(tmp_path), "holds 1 *.tfrecord* files, and none for val or validation or test"),
    ):
        assert message in refusal(record_files.find, "tfrecord", data_dir)


def test_array_records_are_parsed_by_a_process(tmp_path, monkeypatch):
    write_records(tmp_path / "n-train.array_record-00000-of-00002", range(6))
    write_records(tmp_path / "n-train.array_record-00001-of-00002", range(6, 9))
    write_records(tmp_path / "n-test.array_record-00000-of-00001", range(2))
    dataset = load(tmp_path, "tests.app.datasets.sources:from_bytes", "array_record")
    assert (dataset.input_shape, dataset.num_classes) == ((2, 3, 1), 10)
    examples = input_lib.load_examples(dataset.train, TrainConfig(data_workers=1))
    labels = [y.numpy().tolist() for _, y in examples.batches(Epoch(4, 0, 0))]
    assert sorted(sum(labels, [])) == list(range(9))
    monkeypatch.setattr(f"{ME}.NUM_CLASSES", 0)
    message = refusal(load, tmp_path, f"{ME}:parse", "array_record")
    assert "NUM_CLASSES (0) in its module must be a whole" in message


# TFRecord
def parse(record):
    """A record holds a number."""
    number = tf.strings.to_number(record)
    return number[tf.newaxis], tf.cast(number, tf.int32) % NUM_CLASSES


def shapeless(record):
    return tf.cast(tf.io.decode_raw(record, tf.int8), tf.float32), 0


@pytest.fixture
def folder(tmp_path):
    """Three files to train on, of numbers from 0 on, and one to test on."""
    numbers = iter(range(sum(COUNTS) + 2))
    for name, count in zip(("train/a", "train/b", "train/c", "val/a"), (*COUNTS, 2), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with tf.io.TFRecordWriter(f"{tmp_path}/{name}.tfrecord") as file:
            for _ in range(count):
                file.write(str(next(numbers)))
    return tmp_path


def numbers(examples, **place):
    batches = examples.batches(Epoch(4, **{"seed": 0, "number": 0, **place}))
    return [x.numpy()[:, 0].astype(int).tolist() for x, _ in batches]


def test_records_are_counted_parsed_and_met_once_an_epoch(folder):
    dataset = load(folder)
    assert (dataset.input_shape, dataset.num_classes) == ((1,), NUM_CLASSES)
    assert [datasets.num_examples(split) for split in (dataset.train, dataset.test)] == [13, 2]
    examples = input_lib.load_examples(dataset.train, TrainConfig(shuffle_buffer=1))
    orders = [sum(numbers(examples, number=epoch), []) for epoch in range(4)]
    assert [sorted(order) for order in orders] == [list(range(13))] * 4
    assert len({tuple(order) for order in orders}) > 1  # the files' order
    assert numbers(examples, start_step=2) == numbers(examples)[2:]


def test_a_records_index_is_its_place_in_all_files_whatever_their_order(folder):
    records = load(folder).train.ordered(Epoch(1, seed=7))
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


@pytest.mark.telling("GZIP")
@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_files_give_the_batches_of_plain_ones(folder, compression):
    place = {"number": 1, "start_step": 1}
    expected = numbers(input_lib.load_examples(load(folder).train), **place)
    for path in folder.glob("*/[bc].tfrecord"):  # file a stays as it is
        records = list(tf.data.TFRecordDataset(str(path)))
        with tf.io.TFRecordWriter(str(path), compression) as file:
            for record in records:
                file.write(record.numpy())
    compressed = load(folder).train
    assert compressed.num_examples == sum(COUNTS)
    examples = input_lib.load_examples(compressed)
    assert numbers(examples, **place) == expected
    (folder / "train/a.tfrecord.gz").write_bytes((folder / "train/a.tfrecord").read_bytes())
    assert "train/a.tfrecord and train/a.tfrecord.gz, which would count" in refusal(load, folder)
    (folder / "train/a.tfrecord.gz").unlink()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert refusal(load, folder).startswith(f"{path} ({compression}) is damaged: ")


@pytest.mark.telling("9")
@pytest.mark.parametrize("cut", [1, 9, 14])
def test_a_truncated_file_is_refused_with_its_name(folder, cut):
    path = folder / "train/b.tfrecord"
    path.write_bytes(path.read_bytes()[:-cut])
    assert refusal(load, folder) == f"{path} ends within record 0; copy it again."


@pytest.mark.parametrize(
    "features, message",
    [
        (None, "needs features="),
        (f"{ME}:shapeless", "x has an unknown shape"),
        (f"{ME}:load", "cannot parse a record into (x, y): "),
    ],
)
def test_what_parses_no_record_is_refused(folder, features, message):
    assert message in refusal(load, folder, features)


def test_a_flipped_byte_is_named_when_its_turn_comes(folder):
    path = folder / "train/c.tfrecord"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    examples = input_lib.load_examples(load(folder).train)
    message = refusal(list, examples.batches(Epoch(4, 0, 0)))
    assert message.startswith(f"{folder} (train): example 12 cannot be read: corrupted record")
