"""Which files of a directory train, which test, and what parses their records; ArrayRecord."""

import pytest

from tests.app.datasets.sources import write_records
from tests.loading import refusal
from towers.app import datasets
from towers.app.datasets import batches as input_lib
from towers.app.datasets import record_files
from towers.app.datasets.random_access import RandomAccess
from towers.resume.source import InputOptions

NUM_CLASSES = 0  # not a number of classes


def load(folder, features="tests.app.datasets.sources:from_bytes"):
    return datasets.load(
        "array_record", str(folder), input_shape=(), num_classes=1, features=features
    )


@pytest.mark.parametrize(("names", "train", "test"), [
    (["train/b.tfrecord", "train/a.tfrecord", "val/c.tfrecord", "test/d.tfrecord"],
     ["train/a.tfrecord", "train/b.tfrecord"], ["val/c.tfrecord"]),
    (["cats-train.tfrecord-00000-of-00002", "cats-train.tfrecord-00001-of-00002",
      "cats-test.tfrecord-00000-of-00001", "trainer.tfrecord", "README"],
     ["cats-train.tfrecord-00000-of-00002", "cats-train.tfrecord-00001-of-00002"],
     ["cats-test.tfrecord-00000-of-00001"]),
])
def test_folders_or_names_say_what_a_file_is_for(tmp_path, names, train, test):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert record_files.find("tfrecord", str(tmp_path)) == {"train": train, "test": test}


def test_no_directory_or_no_files_are_refused_with_the_forms(tmp_path):
    message = refusal(record_files.find, "tfrecord", None)
    assert "dataset=tfrecord needs data_dir=DIR, with DIR/train/*" in message
    assert "is no directory" in refusal(record_files.find, "tfrecord", str(tmp_path / "no"))
    (tmp_path / "train.tfrecord").write_bytes(b"")
    message = refusal(record_files.find, "tfrecord", str(tmp_path))
    assert "holds 1 *.tfrecord* files, but none for val or validation or test" in message


def test_array_records_are_parsed_by_a_process(tmp_path):
    write_records(tmp_path / "n-train.array_record-00000-of-00002", range(6))
    write_records(tmp_path / "n-train.array_record-00001-of-00002", range(6, 9))
    write_records(tmp_path / "n-test.array_record-00000-of-00001", range(2))
    dataset = load(tmp_path)
    assert isinstance(dataset.train, RandomAccess)
    assert (dataset.input_shape, dataset.num_classes) == ((2, 3, 1), 10)
    examples = input_lib.load_examples(dataset.train, InputOptions(data_workers=1))
    labels = [y.numpy().tolist() for _, y in input_lib.shuffled_batches(examples, 4, 0, 0)]
    assert sorted(sum(labels, [])) == list(range(9))
    assert "needs features=package.module:function" in refusal(load, tmp_path, None)
    own = "tests.app.datasets.record_files_test:load"
    assert "NUM_CLASSES (0) in its module must be a whole" in refusal(load, tmp_path, own)
