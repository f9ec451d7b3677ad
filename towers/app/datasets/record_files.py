"""Loads files of records, and parses each record while training runs."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import tensorflow as tf

from towers.app import named
from towers.app.datasets import random_access
from towers.app.datasets.dataset import Dataset, Found
from towers.app.datasets.tf_data import Streamed, cause
from towers.app.datasets.user import named_classes, of_splits
from towers.app.reading.examples import ArrayRecords
from towers.machine.files import open_to_read
from towers.app.datasets.source import count_elements
from towers.resume.epoch import Epoch

TRAIN, TESTS = "train", ("val", "validation", "test")  # the first of TESTS that exists is used
_HEAD, _TAIL = 12, 4  # bytes before and after a TFRecord's data
_COMPRESSED = {b"\x1f\x8b": "GZIP", b"\x78": "ZLIB"}  # the first bytes of compressed files


def load(dataset: str, data_dir: str | None, features: str | None) -> Dataset:
    """Loads the records below a directory; each is parsed while training runs.

    dataset: "tfrecord" or "array_record"; it is also a part of the files' names.
    features: "package.module:function", which parses a record into (x, y). For TFRecord files, it
        takes a string tensor and calls TensorFlow operations. For ArrayRecord files, it takes bytes
        and returns arrays. If y is one integer, its module must have NUM_CLASSES.
    """
    splits = find(dataset, data_dir)
    if features is None:
        raise ValueError(
            f"dataset={dataset} needs features=package.module:function, record -> (x, y)."
        )
    num_classes = named_classes(features, "features")
    places, found = [f"{data_dir} (train)", f"{data_dir} (test)"], []
    for names, place in zip(splits, places, strict=True):
        paths = {name: f"{Path(data_dir or '')}/{name}" for name in names}
        if dataset == "tfrecord":
            found.append(_tf_records(paths, place, features, num_classes))
        else:
            records = ArrayRecords(list(paths.values()), features)
            found.append(random_access.split_of(records, place, num_classes, custom_loss=False))
    return of_splits(dataset, found, places)


def find(dataset: str, data_dir: str | None) -> tuple[list[str], list[str]]:
    """Returns the sorted names of the training files and of the test files below a directory."""
    forms = f"DIR/train/*.{dataset} and DIR/val/*.{dataset}, or DIR/*train*.{dataset}*"
    if data_dir is None:
        raise ValueError(f"dataset={dataset} needs data_dir=DIR, with {forms}.")
    directory = Path(data_dir)
    paths = [*directory.glob(f"*.{dataset}*"), *directory.glob(f"*/*.{dataset}*")]
    names = sorted(str(path.relative_to(directory)) for path in paths if path.is_file())

    def named_for(word: str) -> list[str]:
        return [name for name in names if word in re.split(r"[^a-z]+", name.lower())]

    train, test = named_for(TRAIN), next(filter(None, map(named_for, TESTS)), [])
    for found, words in ((train, TRAIN), (test, " or ".join(TESTS))):
        if not found:
            raise ValueError(
                f"data_dir ({directory}) holds {len(names)} *.{dataset}* files, and none for "
                f"{words}; give {forms}."
            )
    return train, test


@dataclass(frozen=True, eq=False)
class TfRecords(Streamed):
    """Reads a split of N records from TFRecord files.

    files: for each file, its path, its name below the directory, its compression ("", "GZIP" or
        "ZLIB") and the number of records in all files before it.
    """

    files: Sequence[tuple[str, str, str, int]] = ()

    def identity(self) -> Iterator[bytes]:
        yield b"streamed\0"
        for path, name, *_ in self.files:
            yield os.fsencode(f"{name}\0{os.path.getsize(path)}\0")

    def ordered(self, epoch: Epoch) -> tf.data.Dataset:
        """Returns (index, record): files in the order of `epoch`, then records in file order."""
        count = len(self.files)
        places = epoch.order(tf.range(count, dtype=tf.int64), count).numpy()
        paths, _, *others = zip(*[self.files[place] for place in places], strict=True)
        return tf.data.Dataset.from_tensor_slices((list(paths), *map(list, others))).flat_map(
            lambda path, compression, begin: tf.data.TFRecordDataset(path, compression).enumerate(
                tf.cast(begin, tf.int64)
            )
        )


def _tf_records(paths: dict[str, str], where: str, features: str, num_classes: int | None) -> Found:
    """Makes a split of the files at these paths, by their names below the directory."""
    for name in paths:
        if (plain := name.removesuffix(".gz")) != name and plain in paths:
            raise ValueError(
                f"{where} holds {plain} and {name}, which would count twice; remove one of them."
            )
    counts, compressions = zip(*map(count_records, paths.values()), strict=True)
    if sum(counts) == 0:
        raise ValueError(f"{where}: no records; give at least one.")
    records = tf.data.Dataset.from_tensor_slices((list(paths.values()), list(compressions)))
    begins = accumulate(counts, initial=0)
    split = TfRecords(
        records.flat_map(tf.data.TFRecordDataset),
        where,
        sum(counts),
        named.import_function(features, "features"),
        files=list(zip(paths.values(), paths, compressions, begins)),
    )
    try:
        x, y = split.given_spec
    except Exception as error:  # the user's function may raise anything while it is traced
        raise ValueError(
            f"features ({features!r}) cannot parse a record into (x, y): {named.one_line(error)[:300]}."
        ) from None
    if not all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(x)):
        raise ValueError(f"features ({features!r}): x has an unknown shape; use tf.ensure_shape.")
    if isinstance(y, tf.TensorSpec) and y.dtype.is_integer and num_classes is None:
        raise ValueError(
            f"features ({features!r}): y is a label; add NUM_CLASSES = N to its module."
        )
    return split, (x, y), num_classes or 1


def count_records(path: str) -> tuple[int, str]:
    """Returns the number of records in a file, and its compression: "", "GZIP" or "ZLIB"."""
    count = 0
    try:
        with open_to_read(path, follow=True) as file:
            head = file.read(2)
            size, place = os.fstat(file.fileno()).st_size, 0
            while place < size:  # the lengths of the records suffice, unless they are compressed
                file.seek(place)
                place += _HEAD + int.from_bytes(file.read(8), "little") + _TAIL
                count += 1
        if place == size:
            return count, ""
        for begin, compression in _COMPRESSED.items():
            if head.startswith(begin):
                records = tf.data.TFRecordDataset(path, compression)
                return count_elements(records, f"counting the records of {path}"), compression
        raise ValueError(f"{path} ends within record {count - 1}; copy it again.")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
    except tf.errors.OpError as error:
        raise ValueError(f"{path} ({compression}) is damaged: {cause(error)}.") from None
