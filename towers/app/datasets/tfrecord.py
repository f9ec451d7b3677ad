"""TFRecord files: read one after the other, in an order of files that changes with each epoch.

    a record: length (8 bytes), its checksum (4), the data, their checksum (4)
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import tensorflow as tf

from towers.app.datasets import pixels
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.record_files import RecordFiles, find, import_features
from towers.resume.read_through import count_elements
from towers.resume.source import Epoch
from towers.app.datasets.tf_data import Streamed, cause

SUFFIX = ".tfrecord"
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


def load(data_dir: str | None, features: str | None) -> Dataset:
    """The records below a directory, each parsed when its turn comes.

    Args:
        data_dir: the directory, see `record_files`.
        features: "package.module:function", a record (a string tensor) -> (x, y), in TensorFlow
            operations such as tf.io.parse_single_example. Where y is one integer, its module's
            NUM_CLASSES is the number of labels.

    Raises:
        ValueError: a file cannot be read, or the function gives something else than (x, y).
    """
    files = find("tfrecord", data_dir, SUFFIX)
    parse, num_classes = import_features("tfrecord", features)
    train = _split(files, files.train, "train", parse)
    test = _split(files, files.test, "test", parse)
    shape = _check(train, str(features), num_classes)
    found = pixels.notes(train.given_spec[0], test.given_spec[0])
    divided = pixels.divided_parts(train.given_spec[0])
    return Dataset("tfrecord", train, test, num_classes or 1, shape, found, divided=divided)


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


def _split(
    files: RecordFiles, names: list[str], what: str, parse: Callable[[Any], Any]
) -> TfRecords:
    for name in names:
        if (plain := name.removesuffix(".gz")) != name and plain in names:
            raise ValueError(
                f"{files.directory} ({what}) holds {plain} and {name}, which would count twice; "
                "remove one of them."
            )
    paths = files.paths(names)
    counts, compressions = zip(*map(count_records, paths), strict=True)
    if sum(counts) == 0:
        raise ValueError(f"{files.directory} ({what}): no records; give at least one.")
    return TfRecords(
        tf.data.Dataset.from_tensor_slices((paths, list(compressions))).flat_map(
            tf.data.TFRecordDataset
        ),
        f"{files.directory} ({what})", sum(counts), parse,
        files=paths, names=names, counts=counts, compressions=compressions,
    )


def _check(split: TfRecords, features: str, num_classes: int | None) -> Any:
    """The shape of x."""
    try:
        x, y = split.element_spec
    except Exception as error:  # whatever the user's function raises while it is traced
        raise ValueError(
            f"features ({features!r}) cannot parse a record into (x, y): "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}."
        ) from None
    if not all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(x)):
        raise ValueError(f"features ({features!r}): x has an unknown shape; use tf.ensure_shape.")
    if isinstance(y, tf.TensorSpec) and y.dtype.is_integer and num_classes is None:
        raise ValueError(
            f"features ({features!r}): y is a label; add NUM_CLASSES = N to its module."
        )
    return tf.nest.map_structure(lambda spec: tuple(spec.shape), x)
