"""ArrayRecord files below a directory: a random-access source, read in any number of ways."""

import pytest

from tests.loading import refusal
from tests.app.reading.array_records_test import FEATURES, write
from towers.app import datasets
from towers.app.datasets import batches as input_lib
from towers.app.datasets.random_access import RandomAccess
from towers.resume.source import InputOptions


def load(folder, features=FEATURES):
    return datasets.load(
        "array_record", str(folder), input_shape=(), num_classes=1, features=features
    )


@pytest.fixture(name="folder")
def _folder(tmp_path):
    write(tmp_path / "n-train.array_record-00000-of-00002", range(6))
    write(tmp_path / "n-train.array_record-00001-of-00002", range(6, 9))
    write(tmp_path / "n-test.array_record-00000-of-00001", range(2))
    return tmp_path


def test_records_are_read_and_parsed_by_a_process(folder):
    dataset = load(folder)
    assert isinstance(dataset.train, RandomAccess)
    assert (dataset.input_shape, dataset.num_classes) == ((2, 3, 1), 10)
    examples = input_lib.load_examples(dataset.train, InputOptions(data_workers=1))
    labels = [y.numpy().tolist() for _, y in input_lib.shuffled_batches(examples, 4, 0, 0)]
    assert sorted(sum(labels, [])) == list(range(9))


def test_records_need_what_parses_them(folder):
    assert "dataset=array_record needs features=package.module:function" in refusal(
        load, folder, None
    )
