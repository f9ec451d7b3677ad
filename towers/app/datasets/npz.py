"""Loads the user's NumPy archive, FILE.npz with x_train, y_train, x_test and y_test."""

import os
import zipfile
from typing import BinaryIO

import numpy as np

from towers.app.datasets.dataset import Dataset, usable_memory
from towers.app.datasets.user import from_splits
from towers.app import named
from towers.machine import files

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
    remedy = (
        f"Write it with {_HOW_TO_SAVE}, of numbers. Python objects are never loaded, because that "
        "could run code from the file."
    )
    with named.reading(data_dir, remedy), files.open_to_read(data_dir, follow=True) as file:
        if not zipfile.is_zipfile(file):  # NumPy takes any other file for a pickle
            raise ValueError("it is not an .npz archive, or a part of one")
        file.seek(0)
        _check_size(file)
        with np.load(file, allow_pickle=False) as archive:
            x, y, x_test, y_test = (archive[key] for key in KEYS)
    where = f"{data_dir} (x_train, y_train)", f"{data_dir} (x_test, y_test)"
    return from_splits("npz", (x, y), (x_test, y_test), custom_loss=custom_loss, where=where)


def _check_size(file: BinaryIO) -> None:
    """Raises ValueError if the arrays to read are too large for the memory or for the file."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        members = [m for m in archive.infolist() if m.filename.removesuffix(".npy") in KEYS]
    file.seek(0)
    total = sum(member.file_size for member in members)
    packed = sum(m.file_size for m in members if m.compress_type != zipfile.ZIP_STORED)
    if packed > files.most_expanded(size):
        raise ValueError(
            f"its {size:,} bytes expand to {packed:,}, more than {files.most_expanded(size):,}, "
            "unless it is written without compression"
        )
    if total > usable_memory():
        raise ValueError(f"its arrays have {total:,} bytes, more than this machine's memory")
