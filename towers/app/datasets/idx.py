"""The four IDX files of MNIST and its relatives in one directory -> a Dataset.

    an IDX file: 0, 0, type, rank | rank big-endian uint32 sizes | values
"""

import gzip
import math
import os
import stat
import struct
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from towers.app.datasets.arrays import from_arrays
from towers.app.datasets.dataset import Arrays, Dataset

FILE_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

# The values of a gzipped file must fit into this: twice the largest of the MNIST family (EMNIST
# ByClass, 547 MB). Deflate packs up to 1032:1, so that a small file could fill all memory.
MAX_GZIP_BYTES = 2**30

_GZIP_MAGIC = b"\x1f\x8b"
_MAX_RATIO = 1032  # of deflate; zlib's documentation, "Maximum Compression Factor"
_MAX_RANK = 4
_CHUNK = 2**20
_UINT8 = 0x08
_OTHER_TYPES = {0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}


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


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """The array in an IDX file of unsigned bytes, gzipped or not (told by its first bytes).

    Takes memory for the values that the file delivers, never for what its header promises.
    Format: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database", section "File formats".

    Args:
        path: the file.

    Returns:
        uint8, of rank 1 to 4, at least one value, writable.

    Raises:
        ValueError: naming the file: it cannot be read, is not such a file, or is damaged.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe would wait forever
            kind = "a directory" if os.path.isdir(path) else "not a regular file"
            raise ValueError(f"{path} is {kind}; name an IDX file, gzipped or not.")
        with open(path, "rb") as file:
            magic = file.read(2)
            file.seek(0)
            file_bytes = os.fstat(file.fileno()).st_size
            if magic == _GZIP_MAGIC:
                return _read_gzip(file, path, file_bytes)
            return _read_values(file, path, file_bytes, f"but it has only {file_bytes:,}")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; name an IDX file, gzipped or not.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read_gzip(file: IO[bytes], path: str | os.PathLike[str], file_bytes: int) -> np.ndarray:
    limit, why = file_bytes * _MAX_RATIO, f"which {file_bytes:,} gzipped bytes cannot hold"
    if limit > MAX_GZIP_BYTES:
        limit, why = MAX_GZIP_BYTES, f"above {MAX_GZIP_BYTES:,} unpack it first, with gunzip"
    try:
        with gzip.GzipFile(fileobj=file) as stream:
            return _read_values(stream, path, limit, why)  # type: ignore[arg-type]
    except EOFError:
        raise ValueError(f"{path} is a truncated gzip file; fetch it again.") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is a corrupt gzip file ({error}); fetch it again.") from None


def _read_values(
    stream: IO[bytes], path: str | os.PathLike[str], limit: int, why: str
) -> np.ndarray:
    """Reads the whole stream, which can hold `limit` bytes at most, for the reason `why`."""
    shape = _read_header(stream, path)
    size = math.prod(shape)
    promise = f"{path}: its header promises {' x '.join(map(str, shape))} = {size:,} bytes"
    if size > limit:
        raise ValueError(f"{promise}, {why}; if it is truncated or damaged, fetch it again.")
    values = bytearray()
    # Up to one byte more than promised, which is one too many.
    while chunk := stream.read(min(_CHUNK, size + 1 - len(values))):
        values += chunk
    if len(values) < size:
        raise ValueError(f"{promise}, but it ends after {len(values):,}; fetch it again.")
    if len(values) > size:
        raise ValueError(f"{promise}, but more follow; it is damaged, fetch it again.")
    return np.frombuffer(values, np.uint8).reshape(shape)


def _read_header(stream: IO[bytes], path: str | os.PathLike[str]) -> tuple[int, ...]:
    magic = stream.read(4)
    if len(magic) < 4:
        raise ValueError(f"{path} has only {len(magic)} bytes, too few for an IDX file's header.")
    zeros, code, rank = magic[:2], magic[2], magic[3]
    if zeros == b"\0\0" and code in _OTHER_TYPES and 1 <= rank <= _MAX_RANK:
        raise ValueError(
            f"{path} holds {_OTHER_TYPES[code]} values; only IDX files of unsigned bytes "
            "(uint8) are read, use dataset=npz for others."
        )
    if zeros != b"\0\0" or code != _UINT8 or not 1 <= rank <= _MAX_RANK:
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes: it begins with {magic.hex(' ')}, not "
            "with 00 00 08 01 (labels) or 00 00 08 03 (images)."
        )
    sizes = stream.read(4 * rank)
    if len(sizes) < 4 * rank:
        raise ValueError(f"{path} is truncated: it ends within its header; fetch it again.")
    shape = struct.unpack(f">{rank}I", sizes)
    if 0 in shape:
        raise ValueError(f"{path}: no examples: its header says {' x '.join(map(str, shape))}.")
    return shape
