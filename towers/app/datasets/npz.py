"""Loads the user's NumPy archive, FILE.npz with x_train, y_train, x_test and y_test."""

import os
import zipfile

import numpy as np

from towers.app.datasets.dataset import Dataset
from towers.app.datasets.user import from_splits
from towers.app.named import one_line

KEYS = ("x_train", "y_train", "x_test", "y_test")
_HOW_TO_SAVE = "np.savez(FILE, x_train=..., y_train=..., x_test=..., y_test=...)"


def load(data_dir: str | None, custom_loss: bool = False) -> Dataset:
    """Loads the archive `data_dir`, as `np.savez` writes it; finds the number of classes in it.

    x becomes float32; uint8 images are divided by 255, other numbers keep their values. y: integers
    [N] or [N, 1]. Python objects are never unpickled, because that could run code from the file.

    custom_loss: whether the model brings its own loss. y may then be any array of real numbers
        [N, ...], and dtypes other than floats stay.
    """
    if data_dir is None:
        raise ValueError(f"dataset=npz needs data_dir=FILE.npz, from {_HOW_TO_SAVE}.")
    try:
        if not os.path.isfile(data_dir):  # opening a named pipe would wait forever
            raise ValueError("it is no file" if os.path.exists(data_dir) else "it does not exist")
        if not zipfile.is_zipfile(data_dir):  # NumPy takes any other file for a pickle
            raise ValueError("it is not an .npz archive, or a part of one")
        with np.load(data_dir, allow_pickle=False) as archive:
            x, y, x_test, y_test = (archive[key] for key in KEYS)
    except Exception as error:  # zipfile and NumPy raise many types for a damaged archive
        what = one_line(error)
        if "allow_pickle" in what:
            what = "Python objects are never loaded, for that can run code from the file"
        raise ValueError(
            f"{data_dir} cannot be read: {what}. Write it with {_HOW_TO_SAVE}, of numbers."
        ) from None
    where = f"{data_dir} (x_train, y_train)", f"{data_dir} (x_test, y_test)"
    return from_splits("npz", (x, y), (x_test, y_test), custom_loss=custom_loss, where=where)
