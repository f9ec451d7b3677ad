"""Fashion-MNIST, Zalando's drop-in replacement for MNIST; Keras downloads it when first used."""

import keras

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.idx import load_directory, of_ten_classes
from towers.app.named import one_line


def load(data_dir: str | None = None) -> Dataset:
    """Fashion-MNIST: x float32 [N, 28, 28, 1] in [0, 1]; y int32 [N], 0 (T-shirt) ... 9 (boot).

    Args:
        data_dir: a directory with the four IDX files; None means Keras' cache, into which they
            are downloaded once.

    Raises:
        ValueError: see `load_directory`; also when the download fails.
    """
    name = "fashion_mnist"
    return downloaded(name) if data_dir is None else load_directory(name, data_dir)


def downloaded(name: str) -> Dataset:
    """A data set of `keras.datasets`.

    Raises:
        ValueError: there is no network, or what an earlier download left is damaged.
    """
    try:
        splits = getattr(keras.datasets, name).load_data()
    except Exception as error:  # a bare Exception without a network; any kind of a damaged file
        raise ValueError(
            f"dataset={name}: keras.datasets.{name} cannot load it: {one_line(error)}. If an "
            "earlier download broke off, remove it from ~/.keras/datasets. Without a network put "
            "the files into a directory by hand, and use data_dir=DIR."
        ) from None
    return of_ten_classes(name, splits)
