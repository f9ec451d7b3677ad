"""TFRecord files: read one after the other, in an order of files that changes with each epoch.

    a record: length (8 bytes), its checksum (4), the data, their checksum (4)
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import tensorflow as tf

from towers.app import named
from towers.app.datasets.dataset import Found
from towers.app.datasets.tf_data import Streamed, cause
from towers.resume.read_through import count_elements
from towers.resume.source import Epoch

_HEAD, _TAIL = 12, 4  # bytes around a record's data
_COMPRESSED = {b"\x1f\x8b": "GZIP", b"\x78": "ZLIB"}  # what such files begin with


@dataclass(frozen=True, eq=False)
class TfRecords(Streamed):
    """N records in files.

    files: their paths. names: below their directory, which may be moved.
    counts: of the records in each.
    compressions: how each file is compressed: "", "GZIP" or "ZLIB".
    """

    files: Sequence[str] = ()
    names: Sequence[str] = ()
    counts: Sequence[int] = ()
    compressions: Sequence[str] = ()

    def identity(self) -> Iterator[bytes]:
        yield b"streamed\0"
        for name, file in zip(self.names, self.files, strict=True):
            yield os.fsencode(f"{name}\0{os.path.getsize(file)}\0")

    def ordered(self, epoch: Epoch) -> tf.data.Dataset:
        """The files in another order; the records of each one after the other."""
        count = len(self.files)
        places = epoch.order(count)(tf.range(count, dtype=tf.int64)).numpy()
        begins = [0, *accumulate(self.counts)]
        files = tf.data.Dataset.from_tensor_slices(tuple(
            [values[place] for place in places]
            for values in (self.files, self.compressions, begins)
        ))
        return files.flat_map(
            lambda file, compression, begin:
            tf.data.TFRecordDataset(file, compression).enumerate(tf.cast(begin, tf.int64))
        )


def count_records(path: str) -> tuple[int, str]:
    """The number of records in a file, from their lengths alone, and the file's compression.

    A compressed file has to be read as a whole.

    Returns:
        (count, compression): the latter "", "GZIP" or "ZLIB", as TensorFlow calls it.

    Raises:
        ValueError: it cannot be read, or is no whole TFRecord file.
    """
    count = 0
    try:
        with open(path, "rb") as file:
            head = file.read(2)
            size, place = os.fstat(file.fileno()).st_size, 0
            while place < size:
                file.seek(place)
                place += _HEAD + int.from_bytes(file.read(8), "little") + _TAIL
                count += 1
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
    if place == size:
        return count, ""
    compression = next((name for begin, name in _COMPRESSED.items() if head.startswith(begin)), "")
    if not compression:
        raise ValueError(f"{path} ends within record {count - 1}; copy it again.")
    try:
        records = tf.data.TFRecordDataset(path, compression)
        return count_elements(records, f"counting the records of {path}"), compression
    except tf.errors.OpError as error:
        raise ValueError(f"{path} ({compression}) is damaged: {cause(error)}.") from None


def split_of(
    paths: Sequence[str], names: Sequence[str], where: str, features: str, num_classes: int | None
) -> Found:
    """A split of files.

    Args:
        paths: of the files.
        names: their paths below their directory.
        where: what they are, for the errors.
        features: see `record_files.load`.
        num_classes: the number of labels, where y is one integer.

    Raises:
        ValueError: a file cannot be read, or a record cannot be parsed into (x, y).
    """
    for name in names:
        if (plain := name.removesuffix(".gz")) != name and plain in names:
            raise ValueError(
                f"{where} holds {plain} and {name}, which would count twice; remove one of them."
            )
    counts, compressions = zip(*map(count_records, paths), strict=True)
    if sum(counts) == 0:
        raise ValueError(f"{where}: no records; give at least one.")
    records = tf.data.Dataset.from_tensor_slices((list(paths), list(compressions)))
    split = TfRecords(
        records.flat_map(tf.data.TFRecordDataset), where, sum(counts),
        named.import_function(features, "features"),
        files=paths, names=names, counts=counts, compressions=compressions,
    )
    try:
        x, y = split.given_spec
    except Exception as error:  # whatever the user's function raises while it is traced
        raise ValueError(
            f"features ({features!r}) cannot parse a record into (x, y): "
            f"{named.one_line(error)[:300]}."
        ) from None
    if not all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(x)):
        raise ValueError(f"features ({features!r}): x has an unknown shape; use tf.ensure_shape.")
    if isinstance(y, tf.TensorSpec) and y.dtype.is_integer and num_classes is None:
        raise ValueError(
            f"features ({features!r}): y is a label; add NUM_CLASSES = N to its module."
        )
    return split, (x, y), num_classes or 1
