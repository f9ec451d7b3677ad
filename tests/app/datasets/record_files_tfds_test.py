"""A data set of TensorFlow Datasets, prepared here: the same examples, by index."""

import sys
from functools import partial

import numpy as np
import pytest

from tests.loading import refusal
from towers.app import datasets
from towers.app.datasets import batches as input_lib
from towers.resume.source import InputOptions

load = partial(datasets.load, input_shape=(), num_classes=1)


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    pytest.importorskip("tensorflow_datasets", reason="pip install 'tf-towers[tfds]'")
    from tests.app.datasets.small_digits import SmallDigits

    folder = tmp_path_factory.mktemp("tfds")
    SmallDigits(data_dir=folder, file_format="array_record").download_and_prepare()
    return str(folder)


@pytest.mark.telling("1")
@pytest.mark.parametrize("data_workers", [0, 1])
def test_examples_are_those_of_the_data_set(folder, data_workers):
    import tensorflow_datasets

    dataset = load("tfds:small_digits", folder)
    assert (dataset.input_shape, dataset.num_classes) == ((8, 8, 1), 3)
    assert tuple(dataset.class_names) == ("a", "b", "c")
    examples = input_lib.load_examples(dataset.train, InputOptions(data_workers=data_workers))
    found = list(input_lib.ordered_batches(examples, 8))
    source = tensorflow_datasets.data_source("small_digits", split="train", data_dir=folder)
    np.testing.assert_array_equal(
        np.concatenate([x for x, _ in found]),
        np.stack([example["image"] for example in source]).astype("float32") / 255,
    )
    np.testing.assert_array_equal(
        np.concatenate([y for _, y in found]), [example["label"] for example in source]
    )


@pytest.mark.matrix
def test_a_model_with_a_loss_of_its_own_gets_them_too(folder):
    dataset = load("tfds:small_digits", folder, custom_loss=True)
    assert dataset.num_classes is None and dataset.train.num_examples == 30


def test_an_unknown_data_set_is_one_line(folder):
    error = refusal(load, "tfds:nosuch", folder)
    assert error.startswith("dataset=tfds:nosuch cannot be loaded: ") and len(error) < 200


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    error = refusal(load, "tfds:mnist", None)
    assert "pip install 'tf-towers[tfds]'" in error
