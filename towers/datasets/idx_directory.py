"""The four IDX files of MNIST and its relatives in one directory -> a Dataset."""

import os
from pathlib import Path

import numpy as np

from towers.datasets.arrays import from_arrays
from towers.datasets.dataset import Arrays, Dataset
from towers.datasets.idx import read_idx

FILE_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def load_directory(name: str, data_dir: str | os.PathLike[str], num_classes: int) -> Dataset:
    """Reads `FILE_NAMES`, each with or without .gz, also spelled train-images.idx3-ubyte.

    Args:
        name: of the data set.
        data_dir: the directory.
        num_classes: labels must lie in 0 ... num_classes - 1.

    Returns:
        x float32 [N, height, width, 1] in [0, 1]; y int32 [N].

    Raises:
        ValueError: a file is missing or damaged, images and labels are swapped, or they do not
            fit together.
    """
    directory = Path(data_dir)
    if not directory.is_dir():
        kind = "is not a directory" if directory.exists() else "does not exist"
        raise ValueError(
            f"data_dir ({data_dir}) {kind}; it must be a directory that holds "
            f"{', '.join(FILE_NAMES)}, gzipped or not."
        )
    train_images, train_labels, test_images, test_labels = [
        _find(directory, file_name) for file_name in FILE_NAMES
    ]
    return from_arrays(
        name,
        _read_pair(train_images, train_labels),
        _read_pair(test_images, test_labels),
        (f"{train_images} and {train_labels}", f"{test_images} and {test_labels}"),
        num_classes,
    )


def _find(directory: Path, file_name: str) -> Path:
    spellings = [file_name, file_name.replace("-idx", ".idx")]
    candidates = [spelling + suffix for spelling in spellings for suffix in ("", ".gz")]
    for candidate in candidates:
        # Kaggle's archive also has directories of these names.
        if os.path.isfile(directory / candidate):
            return directory / candidate
    raise ValueError(
        f"data_dir ({directory}) lacks {file_name}: none of {', '.join(candidates)} is a file "
        "there."
    )


def _read_pair(images_path: Path, labels_path: Path) -> Arrays:
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim == 1 and labels.ndim == 3:
        raise ValueError(
            f"{images_path} holds labels and {labels_path} holds images: they are swapped; "
            "rename them."
        )
    if images.ndim != 3:
        raise ValueError(_wrong_rank(images_path, images, "images are 3-dimensional"))
    if labels.ndim != 1:
        raise ValueError(_wrong_rank(labels_path, labels, "labels are 1-dimensional"))
    return images[..., np.newaxis], labels


def _wrong_rank(path: Path, array: np.ndarray, rule: str) -> str:
    shape = " x ".join(map(str, array.shape))
    return f"{path} holds {array.ndim}-dimensional values ({shape}), but {rule}; is it misnamed?"
