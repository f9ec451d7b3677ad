"""Loads Fashion-MNIST, Zalando's drop-in replacement for MNIST; Keras downloads it once."""

import keras

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.idx import load_directory, of_ten_classes
from towers.app.named import one_line


def load(data_dir: str | None = None) -> Dataset:
    """Loads x, float32 [N, 28, 28, 1] in [0, 1], and y, int32 [N], 0 (T-shirt) ... 9 (boot).

    data_dir: a directory with the four IDX files; None means Keras' cache.
    """
    if data_dir:
        return load_directory("fashion_mnist", data_dir)
    return downloaded("fashion_mnist")


def downloaded(name: str) -> Dataset:
    """Loads a data set of ten classes from `keras.datasets`; raises ValueError if Keras cannot."""
    try:
        splits = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Exception if there is no network; any type for a damaged file
        raise ValueError(
            f"dataset={name}: keras.datasets.{name} cannot load it: {one_line(error)}. If an "
            "earlier download broke off, remove it from ~/.keras/datasets. Without a network, "
            "copy that directory from a machine that has the data."
        ) from None
    return of_ten_classes(name, splits)
