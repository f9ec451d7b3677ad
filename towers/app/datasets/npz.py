"""A NumPy archive of one's own: FILE.npz with x_train, y_train, x_test and y_test."""

import os
from dataclasses import replace

import numpy as np

from towers.app.datasets.arrays import of_classes
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.user import from_splits
from towers.app.named import one_line

KEYS = ("x_train", "y_train", "x_test", "y_test")
_HOW_TO_SAVE = "np.savez(FILE, x_train=..., y_train=..., x_test=..., y_test=...)"


def load(data_dir: str | None, own_task: bool = False) -> Dataset:
    """The data set in an archive; the number of classes is 1 + its largest label.

    x: uint8 images are divided by 255 (see `pixels`), all other numbers keep their values;
        float32 afterwards. y: integers [N] or [N, 1]. A model that brings its own loss gets any
        structure and type, see `user.from_splits`.

    Args:
        data_dir: the file, as `np.savez` or `np.savez_compressed` writes it.
        own_task: the model brings its own loss.

    Raises:
        ValueError: the file cannot be read, lacks a key, or holds Python objects (which are
            never unpickled: that would run code from the file); see also `from_arrays`.
    """
    if data_dir is None:
        raise ValueError(f"dataset=npz needs data_dir=FILE.npz, from {_HOW_TO_SAVE}.")
    arrays = _read(data_dir)
    train, test = ((arrays[f"x_{which}"], arrays[f"y_{which}"]) for which in ("train", "test"))
    if own_task:
        return from_splits("npz", train, test)
    return replace(of_classes(data_dir, train, test, None), name="npz")


def _read(path: str) -> dict[str, np.ndarray]:
    if not os.path.isfile(path):
        kind = "is not a file" if os.path.exists(path) else "does not exist"
        raise ValueError(f"data_dir ({path}) {kind}; dataset=npz needs a FILE.npz.")
    try:
        with open(path, "rb") as file:
            is_zip = file.read(4) in (b"PK\3\4", b"PK\5\6")  # the second: an empty archive
        archive = np.load(path, allow_pickle=False) if is_zip else None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
    except Exception as error:  # zipfile and NumPy raise many kinds for a damaged archive
        raise ValueError(f"{path} is damaged: {one_line(error)}; write it again.") from None
    if archive is None:
        raise ValueError(f"{path} is not an .npz archive; write it with {_HOW_TO_SAVE}.")
    with archive:
        missing = [key for key in KEYS if key not in archive.files]
        if missing:
            raise ValueError(
                f"{path} lacks {', '.join(missing)}; it has {', '.join(archive.files) or 'none'}. "
                f"Write it with {_HOW_TO_SAVE}."
            )
        return {key: _read_array(archive, key, path) for key in KEYS}


def _read_array(archive: "np.lib.npyio.NpzFile", key: str, path: str) -> np.ndarray:
    try:
        array = archive[key]
    except Exception as error:  # zipfile and NumPy raise many kinds for a damaged archive
        if "Object arrays" in str(error):
            raise ValueError(
                f"{path}: {key} is an array of Python objects, which are never loaded (that can "
                f"run code from the file); save numbers, such as {key}.astype('float32')."
            ) from None
        raise ValueError(f"{path}: {key} is damaged: {one_line(error)}; write it again.") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: {key} is no array; write it with {_HOW_TO_SAVE}.")
    return array
