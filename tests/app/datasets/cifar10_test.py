"""CIFAR-10's binary version in a directory. What Keras downloads: fashion_mnist_test."""

import numpy as np
import pytest

from tests.loading import load, refusal
from towers.app.datasets import cifar10

FILES = (*cifar10.TRAIN_FILES, *cifar10.TEST_FILES)


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """Two images a file; their pixels are 64 * channel + 2 * row + column, plus the file's."""
    channel, row, column = np.indices((3, 32, 32))
    for index, name in enumerate(FILES):
        pixels = (64 * channel + 2 * row + column + index).astype(np.uint8).tobytes()
        content = bytes([index]) + pixels + bytes([9 - index]) + pixels[::-1]
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_images_and_labels_are_read(folder):
    dataset = load("cifar10", str(folder))
    (x, y), (x_test, y_test) = dataset.train, dataset.test
    assert x.shape == (10, 32, 32, 3) and x_test.shape == (2, 32, 32, 3)
    assert y.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5] and y_test.tolist() == [5, 4]
    # row 5, column 7 of the first image of data_batch_3.bin: 10 + 7 + 2, and 64 for each channel
    np.testing.assert_allclose(x[4, 5, 7] * 255, [19, 83, 147], rtol=1e-6)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda path: path.unlink(), "data_batch_2.bin"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "must hold data_batch_1.bin"),
    (lambda path: path.write_bytes(b"\x0a" + path.read_bytes()[1:]), "label 10 of example 2 is"),
])
def test_a_file_that_is_missing_or_damaged_is_an_error(folder, spoil, message):
    spoil(folder / "data_batch_2.bin")
    told = refusal(load, "cifar10", str(folder))
    assert str(folder) in told and message in told
