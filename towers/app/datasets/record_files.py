"""Files of records in a directory: which of them train, which test, and what parses a record.

    DIR/train/*.tfrecord and DIR/val/*.tfrecord (or DIR/test)
    DIR/...train....tfrecord-00000-of-00001 and DIR/...val..., as TensorFlow Datasets names them
"""

import re
from pathlib import Path

from towers.app import named
from towers.app.datasets import random_access, tfrecord
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.user import named_classes, of_splits
from towers.app.reading.array_records import ArrayRecords

TRAIN, TESTS = "train", ("val", "validation", "test")  # the first of these that is there


def load(dataset: str, data_dir: str | None, features: str | None) -> Dataset:
    """The records below a directory, each parsed when its turn comes.

    Args:
        dataset: "tfrecord" or "array_record", which the files' names hold, too.
        data_dir: the directory.
        features: "package.module:function", which parses a record into (x, y): of a TFRecord file
            a string tensor, in TensorFlow operations such as tf.io.parse_single_example; of an
            ArrayRecord file bytes, into arrays. Where y is one integer, its module's NUM_CLASSES is
            the number of labels.

    Raises:
        ValueError: a file cannot be read, or the function gives something else than (x, y).
    """
    files = find(dataset, data_dir)
    if features is None:
        raise ValueError(
            f"dataset={dataset} needs features=package.module:function, record -> (x, y)."
        )
    named.import_function(features, "features")
    num_classes = named_classes(features, "features")
    places = [f"{data_dir} ({which})" for which in files]
    found = []
    for names, place in zip(files.values(), places, strict=True):
        paths = [f"{Path(data_dir or '')}/{name}" for name in names]
        if dataset == "tfrecord":
            found.append(tfrecord.split_of(paths, names, place, features, num_classes))
        else:
            records = ArrayRecords(paths, features)
            found.append(random_access.split_of(records, place, num_classes, own_task=False))
    return of_splits(dataset, found, places)


def find(dataset: str, data_dir: str | None) -> dict[str, list[str]]:
    """The names of the files below a directory to train and to test on, sorted.

    Raises:
        ValueError: it cannot be read, or holds no such files to train or to test on.
    """
    forms = f"DIR/train/*.{dataset} and DIR/val/*.{dataset}, or DIR/*train*.{dataset}*"
    if data_dir is None:
        raise ValueError(f"dataset={dataset} needs data_dir=DIR, with {forms}.")
    directory = Path(data_dir)
    if not directory.is_dir():
        raise ValueError(f"data_dir ({directory}) is no directory; give one with {forms}.")
    words = {
        str(path.relative_to(directory)): re.split(
            r"[^a-z]+", str(path.relative_to(directory)).lower()
        )
        for pattern in (f"*.{dataset}*", f"*/*.{dataset}*")
        for path in directory.glob(pattern) if path.is_file()
    }
    found = {word: sorted(n for n in words if word in words[n]) for word in (TRAIN, *TESTS)}
    train, test = found[TRAIN], next((found[word] for word in TESTS if found[word]), [])
    if not (train and test):
        missing = TRAIN if not train else " or ".join(TESTS)
        raise ValueError(
            f"data_dir ({directory}) holds {len(words)} *.{dataset}* files, but none for "
            f"{missing}; give {forms}."
        )
    return {"train": train, "test": test}
