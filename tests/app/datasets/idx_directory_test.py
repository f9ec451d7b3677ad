"""Four idx files in a directory, however they are spelled, whole and damaged."""

import gzip

import numpy as np
import pytest

from tests.app.datasets.idx_files import examples
from tests.loading import load, refusal
from towers.app import datasets
from towers.app.datasets.idx import FILE_NAMES


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize(
    "spelling, compress",
    [("{}", bytes), ("{}.gz", gzip.compress), (".{}", bytes), (".{}.gz", gzip.compress)],
)
def test_four_idx_files_are_read_from_data_dir(idx_dir, name, spelling, compress):
    dataset = load(name, idx_dir(spelling, compress))
    x, y = examples(6)
    np.testing.assert_array_equal(dataset.train[0][..., 0], x.astype(np.float32) / np.float32(255))
    np.testing.assert_array_equal(dataset.train[1], y)
    assert datasets.num_examples(dataset.test) == 3
    assert (dataset.name, dataset.input_shape) == (name, (4, 5, 1))


def test_directory_of_a_file_name_is_passed_over_for_the_file(idx_dir, tmp_path):
    (tmp_path / FILE_NAMES[0]).mkdir()  # as in Kaggle's archive
    assert datasets.num_examples(load("mnist", idx_dir(".{}")).test) == 3


def test_missing_idx_file_is_refused_naming_what_was_looked_for(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_labels=None))
    assert "data_dir (" in message and "t10k-labels-idx1-ubyte.gz" in message
    assert "t10k-labels.idx1-ubyte" in message and "train" not in message.split("lacks")[1]


def test_missing_data_dir_is_refused(tmp_path):
    assert "does not exist" in refusal(load, "mnist", str(tmp_path / "nothing"))


def test_file_as_data_dir_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    assert "is not a directory" in refusal(load, "mnist", str(tmp_path / "file"))


def test_swapped_images_and_labels_are_refused_saying_so(idx_dir):
    x, y = examples(6)
    message = refusal(load, "mnist", idx_dir(train_images=y, train_labels=x))
    assert "swapped" in message
    assert "train-images-idx3-ubyte holds labels" in message


def test_labels_in_the_place_of_images_are_refused(idx_dir):
    message = refusal(load, "mnist", idx_dir(train_images=examples(6)[1]))
    assert "train-images" in message and "images are 3-dimensional" in message


def test_images_in_the_place_of_labels_are_refused(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_labels=examples(3)[0]))
    assert "t10k-labels" in message and "labels are 1-dimensional" in message


def test_images_and_labels_of_different_counts_are_refused_naming_both(idx_dir):
    message = refusal(load, "mnist", idx_dir(train_labels=examples(5)[1]))
    assert "train-images-idx3-ubyte" in message and "train-labels-idx1-ubyte" in message
    assert "6 examples" in message and "5 labels" in message


def test_idx_label_out_of_range_is_refused_naming_the_file(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_labels=np.array([9, 10, 0], np.uint8)))
    assert "t10k-labels" in message and "label 10 of example 1" in message and "0 to 9" in message


def test_train_and_test_images_of_different_sizes_are_refused(idx_dir):
    message = refusal(load, "mnist", idx_dir(t10k_images=examples(3, (4, 6))[0]))
    assert "(4, 6, 1)" in message and "(4, 5, 1)" in message
