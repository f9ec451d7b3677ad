"""Reads a Dataset from the four IDX files of MNIST, or of a similar data set, in a directory.

an IDX file: 0, 0, type, rank | rank big-endian uint32 sizes | values
"""

import gzip
import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from towers.app.datasets.dataset import Dataset, usable_memory
from towers.app.datasets.user import from_splits
from towers.app.named import reading
from towers.machine import files

FILE_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
# The limit for the values in a gzipped file, twice the largest of the MNIST family (EMNIST ByClass,
# 547 MB).
MAX_GZIP_BYTES = 2**30


def load_directory(name: str, data_dir: str | os.PathLike[str]) -> Dataset:
    """Reads `FILE_NAMES`, each with or without .gz, also spelled train-images.idx3-ubyte.

    x: float32 [N, height, width, 1] in [0, 1]. y: int32 [N] in 0 ... 9.
    """
    paths = [_find(name, Path(data_dir), file_name) for file_name in FILE_NAMES]
    arrays = [read_idx(path) for path in paths]
    for path, array, rank in zip(paths, arrays, (3, 1, 3, 1), strict=True):
        if array.ndim != rank:
            raise ValueError(
                f"{path} holds {array.ndim}-dimensional values, but images are 3-dimensional and "
                "labels are 1-dimensional; is it misnamed, or swapped with another file?"
            )
    where = f"{paths[0]} and {paths[1]}", f"{paths[2]} and {paths[3]}"
    return of_ten_classes(name, (arrays[:2], arrays[2:]), where)


def of_ten_classes(
    name: str, splits: Iterable[Sequence[np.ndarray]], where: Sequence[str] = ()
) -> Dataset:
    """Makes a Dataset of ((x_train, y_train), (x_test, y_test)): images, and labels in 0 ... 9.

    Each x is uint8 [N, height, width, ...], each y [N] or [N, 1]. where: a name for each split.
    """
    train, test = ((x if x.ndim == 4 else x[..., np.newaxis], y) for x, y in splits)
    return replace(from_splits(name, train, test, num_classes=10, where=where), notes=())


def _find(name: str, directory: Path, file_name: str) -> Path:
    """Returns the path of a file of the data set `name`, in one of its spellings."""
    dotted = file_name.replace("-idx", ".idx")
    candidates = [file_name, f"{file_name}.gz", dotted, f"{dotted}.gz"]
    for candidate in candidates:
        # Kaggle's archive also has directories of these names; reading a pipe would wait forever.
        if (directory / candidate).is_file():
            return directory / candidate
    # The default data set is mnist, so a user may just have named none.
    raise ValueError(
        f"data_dir ({directory}) lacks {file_name}: none of {', '.join(candidates)} is a file "
        f"there. dataset={name} needs a directory with {', '.join(FILE_NAMES)}, gzipped or not. "
        "For other data, give another `dataset`, such as dataset=image_folder."
    )


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Reads the uint8 array, of rank 1 to 4, in an IDX file, gzipped (by its first bytes) or not.

    Its header cannot make it allocate more memory than the file may hold.
    Format: Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database", section "File formats".
    """
    kind = " as an IDX file of unsigned bytes"
    with reading(path, "Fetch it again.", kind), files.open_to_read(path, follow=True) as file:
        stream: Any = file
        limit = os.path.getsize(path)
        if stream.peek(2)[:2] == b"\x1f\x8b":
            stream = gzip.GzipFile(fileobj=file)
            limit = min(MAX_GZIP_BYTES, files.most_expanded(limit))
        zeros, dtype, rank = struct.unpack(">HBB", stream.read(4))
        if zeros != 0 or dtype != 8 or not 1 <= rank <= 4:  # 8: unsigned bytes
            raise ValueError("it begins neither with 00 00 08 01 (labels) nor with 00 00 08 03")
        shape = struct.unpack(f">{rank}I", stream.read(4 * rank))
        size = math.prod(shape)
        limit = min(limit, usable_memory())  # a sparse file may be larger than the memory
        if not 0 < size <= limit:
            raise ValueError(f"its header promises {size:,} bytes; 1 to {limit:,} may be here")
        # One byte more finds a stream that is too long, and checks the sum of a gzipped one.
        values = stream.read(size + 1)
        if len(values) != size:
            raise ValueError(f"its header promises {size:,} bytes; fewer or more follow")
        return np.frombuffer(values, np.uint8).reshape(shape)
