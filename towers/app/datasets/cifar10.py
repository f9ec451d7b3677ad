"""CIFAR-10: 50,000 training and 10,000 test images of 10 things; downloaded when first used.

Read from its binary version alone. The Python version is pickled, and unpickling runs code.
"""

import gzip
import os
import tarfile
import zlib
from pathlib import Path
from typing import IO

import keras
import numpy as np

from towers.app.datasets.arrays import from_arrays
from towers.app.datasets.dataset import Arrays, Dataset
from towers.app.named import one_line

NUM_CLASSES = 10
ARCHIVE = "cifar-10-binary.tar.gz"
FOLDER = "cifar-10-batches-bin"  # in the archive
TRAIN_FILES = tuple(f"data_batch_{index}.bin" for index in range(1, 6))
TEST_FILES = ("test_batch.bin",)
ORIGIN = "https://www.cs.toronto.edu/~kriz/"  # A. Krizhevsky, the data set's home, with its MD5
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CACHE_DIR: str | None = None  # None: Keras' own, ~/.keras or $KERAS_HOME
IMAGES_A_FILE = 10_000

_IMAGE_SHAPE = (3, 32, 32)  # red, green, blue, each from the upper left row by row
_ROW_BYTES = 1 + 3 * 32 * 32  # the label before the image
_PYTHON_VERSION = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1")


def load(data_dir: str | None = None) -> Dataset:
    """CIFAR-10: x float32 [N, 32, 32, 3] in [0, 1]; y int32 [N], 0 (airplane) ... 9 (truck).

    Format: A. Krizhevsky, "The CIFAR-10 dataset", section "Binary version".

    Args:
        data_dir: cifar-10-binary.tar.gz, its directory, or the directory of the six .bin files;
            None means Keras' cache, into which it is downloaded once and checked each time.

    Raises:
        ValueError: a file is missing or damaged, or is the Python version's; the download fails,
            or its hash is wrong.
    """
    path = _find(Path(_download() if data_dir is None else data_dir))
    names = (*TRAIN_FILES, *TEST_FILES)
    files = _read_archive(path, names) if path.is_file() else _read_folder(path, names)
    train, test = (
        (np.concatenate([files[name][0] for name in split]),
         np.concatenate([files[name][1] for name in split]))
        for split in (TRAIN_FILES, TEST_FILES)
    )
    return from_arrays("cifar10", train, test, (f"{path} (train)", f"{path} (test)"), NUM_CLASSES)


def _find(path: Path) -> Path:
    """The archive, or the folder of the .bin files."""
    if path.is_file() and path.name not in _PYTHON_VERSION:
        return path
    for candidate in (path, path / FOLDER):
        if any(os.path.isfile(candidate / name) for name in (*TRAIN_FILES, *TEST_FILES)):
            return candidate
    if os.path.isfile(path / ARCHIVE):
        return path / ARCHIVE
    if path.name in _PYTHON_VERSION or any((path / name).exists() for name in _PYTHON_VERSION):
        raise ValueError(
            f"data_dir ({path}) holds CIFAR-10's Python version, which is pickled and never "
            f"loaded (that can run code from the file); fetch {ORIGIN}{ARCHIVE} instead."
        )
    kind = f"holds neither {ARCHIVE} nor {TRAIN_FILES[0]}" if path.exists() else "does not exist"
    raise ValueError(f"data_dir ({path}) {kind}; put {ORIGIN}{ARCHIVE} there.")


def _read_folder(folder: Path, names: tuple[str, ...]) -> dict[str, Arrays]:
    files = {}
    for name in names:
        try:
            with open(folder / name, "rb") as file:
                files[name] = _read(file, os.fstat(file.fileno()).st_size, folder / name)
        except OSError as error:
            raise ValueError(
                f"{folder / name} cannot be read: {error.strerror or error}; unpack {ARCHIVE} "
                "again."
            ) from None
    return files


def _read_archive(path: Path, names: tuple[str, ...]) -> dict[str, Arrays]:
    """Reads the archive once, from beginning to end; writes nothing to the disk."""
    files = {}
    try:
        with gzip.open(path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    name = os.path.basename(member.name)
                    if name in names and member.isfile():
                        content = archive.extractfile(member)
                        files[name] = _read(content, member.size, f"{name} in {path}")
            while stream.read(2**20):  # the checksum of all is at the end
                pass
    except (EOFError, OSError, tarfile.TarError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {one_line(error)}; fetch it again.") from None
    missing = [name for name in names if name not in files]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; fetch {ORIGIN}{ARCHIVE} again.")
    return files


def _read(file: IO[bytes] | None, size: int, where: str | Path) -> Arrays:
    """x uint8 [N, 32, 32, 3], y uint8 [N] of one file of `size` bytes."""
    assert file is not None
    wanted = IMAGES_A_FILE * _ROW_BYTES
    if size != wanted:  # before any memory is taken for it
        raise ValueError(
            f"{where} has {size:,} bytes, but {IMAGES_A_FILE:,} images of {_ROW_BYTES:,} take "
            f"{wanted:,}; fetch {ARCHIVE} again."
        )
    rows = np.frombuffer(file.read(), np.uint8).reshape(IMAGES_A_FILE, _ROW_BYTES)
    y = rows[:, 0]
    if y.max() >= NUM_CLASSES:
        index = int((y >= NUM_CLASSES).argmax())
        raise ValueError(
            f"{where}: label {y[index]} of image {index} is out of range, 0 to {NUM_CLASSES - 1}; "
            f"fetch {ARCHIVE} again."
        )
    return np.ascontiguousarray(rows[:, 1:].reshape(-1, *_IMAGE_SHAPE).transpose(0, 2, 3, 1)), y


def _download() -> str:
    """The archive in Keras' cache, fetched where it is missing or differs from MD5."""
    try:
        return keras.utils.get_file(
            ARCHIVE, ORIGIN + ARCHIVE, file_hash=MD5, hash_algorithm="md5", cache_dir=CACHE_DIR
        )
    except Exception as error:  # get_file raises bare Exception when there is no network
        raise ValueError(
            f"dataset=cifar10: cannot download {ORIGIN}{ARCHIVE}: {one_line(error)}. Put it into "
            "a directory by hand and use data_dir=DIR."
        ) from None
