"""Files of records in a directory: which of them train, which test, and what parses a record.

    DIR/train/*.tfrecord and DIR/val/*.tfrecord (or DIR/test)
    DIR/...train....tfrecord-00000-of-00001 and DIR/...val..., as TensorFlow Datasets names them
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from towers.app import named
from towers.app.datasets.user import named_classes

TRAIN, TESTS = "train", ("val", "validation", "test")  # the first of these that is there


class RecordFiles(NamedTuple):
    """directory: where they are. train, test: their names below it, sorted."""

    directory: Path
    train: list[str]
    test: list[str]

    def paths(self, names: list[str]) -> list[str]:
        """The paths as they are opened."""
        return [f"{self.directory}/{name}" for name in names]


def find(dataset: str, data_dir: str | None, suffix: str) -> RecordFiles:
    """The files below a directory.

    Args:
        dataset: its name, for the errors.
        data_dir: the directory.
        suffix: what their names hold, such as ".tfrecord".

    Raises:
        ValueError: it cannot be read, or holds no such files to train or to test on.
    """
    forms = f"DIR/train/*{suffix} and DIR/val/*{suffix}, or DIR/*train*{suffix}*"
    if data_dir is None:
        raise ValueError(f"dataset={dataset} needs data_dir=DIR, with {forms}.")
    directory = Path(data_dir)
    if not directory.is_dir():
        raise ValueError(f"data_dir ({directory}) is no directory; give one with {forms}.")
    names = sorted(
        str(path.relative_to(directory))
        for path in (*directory.glob(f"*{suffix}*"), *directory.glob(f"*/*{suffix}*"))
        if path.is_file()
    )
    train = [name for name in names if TRAIN in _words(name)]
    test = next((t for word in TESTS if (t := [n for n in names if word in _words(n)])), [])
    if not (train and test):
        missing = TRAIN if not train else " or ".join(TESTS)
        raise ValueError(
            f"data_dir ({directory}) holds {len(names)} *{suffix}* files, but none for {missing}; "
            f"give {forms}."
        )
    return RecordFiles(directory, train, test)


def import_features(
    dataset: str, spec: str | None
) -> tuple[Callable[[Any], Any], int | None]:
    """The function that parses a record, and its module's NUM_CLASSES, if it has one.

    Args:
        dataset: its name, for the errors.
        spec: "package.module:function".

    Raises:
        ValueError: there is none, or it cannot be imported.
    """
    if spec is None:
        raise ValueError(
            f"dataset={dataset} needs features=package.module:function, record -> (x, y)."
        )
    function = named.import_function(spec, "features")
    return function, named_classes(spec, "features")


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z]+", name.lower())
