"""Which files of a directory train, which test, and what parses their records."""

import pytest

from tests.loading import refusal
from towers.app.datasets import record_files

NUM_CLASSES = 0  # not a number of classes


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
    found = record_files.find("tfrecord", str(tmp_path), ".tfrecord")
    assert (found.train, found.test) == (train, test)
    assert found.paths(["a"]) == [f"{tmp_path}/a"]


def test_no_directory_or_no_files_are_refused_with_the_forms(tmp_path):
    find = record_files.find
    message = refusal(find, "tfrecord", None, ".tfrecord")
    assert "dataset=tfrecord needs data_dir=DIR, with DIR/train/*" in message
    assert "is no directory" in refusal(find, "tfrecord", str(tmp_path / "no"), ".tfrecord")
    (tmp_path / "train.tfrecord").write_bytes(b"")
    message = refusal(find, "tfrecord", str(tmp_path), ".tfrecord")
    assert "holds 1 *.tfrecord* files, but none for val or validation or test" in message


def test_what_parses_a_record_is_needed_and_its_number_of_classes_is_checked():
    features = record_files.import_features
    assert "needs features=package.module:function" in refusal(features, "tfrecord", None)
    own = "tests.app.datasets.record_files_test:refusal"
    assert "NUM_CLASSES (0) in its module must be a whole number" in refusal(features, "t", own)
    parse, num_classes = features("tfrecord", "tests.app.datasets.sources:from_bytes")
    assert (parse.__name__, num_classes) == ("from_bytes", 10)
