"""Loads CIFAR-10, 50,000 training and 10,000 test images of 10 classes; Keras downloads it."""

from pathlib import Path

import numpy as np

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.fashion_mnist import downloaded
from towers.app.datasets.idx import of_ten_classes

TRAIN_FILES = tuple(f"data_batch_{index}.bin" for index in range(1, 6))
TEST_FILES = ("test_batch.bin",)


def load(data_dir: str | None = None) -> Dataset:
    """Loads x, float32 [N, 32, 32, 3] in [0, 1], and y, int32 [N], 0 (airplane) ... 9 (truck).

    data_dir: the directory of the six .bin files of the binary version; None means Keras' cache,
        into which Keras downloads the Python version once.
    """
    if data_dir is None:
        return downloaded("cifar10")
    splits = []
    for names in (TRAIN_FILES, TEST_FILES):
        try:  # a row: the label, then red, green, blue, each row by row
            rows = np.concatenate([
                np.fromfile(Path(data_dir, name), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
                for name in names
            ])
        except (OSError, ValueError) as error:
            raise ValueError(
                f"data_dir ({data_dir}) must hold {', '.join(names)}, whole, of "
                f"cifar-10-binary.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html: {error}."
            ) from None
        splits.append((rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0]))
    return of_ten_classes("cifar10", splits, (f"{data_dir} (train)", f"{data_dir} (test)"))
