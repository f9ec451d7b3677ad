"""Images of one's own, one folder a class.

    DIR/train/CLASS/*.png and DIR/val/CLASS/*.png (or DIR/test): a split of one's own
    DIR/CLASS/*.png: 4 of 5 images train, by a hash of CLASS/FILE
    DIR/*.png: no classes, for a trained model to predict
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from towers.datasets import image_files
from towers.datasets.arrays import from_arrays
from towers.datasets.dataset import Dataset
from towers.datasets.image_files import ImageFiles, decode_all, header_shape, image_shape
from towers.datasets.memory_share import MEMORY_SHARE, fits

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
TRAIN, TESTS = "train", ("val", "test")  # val first: a test folder beside it often has no labels
LOOKED_AT = 10_000  # images of a split whose headers are read: less than a second
_DECODED = 100  # of these, where the header is of another kind
TEST_SHARE = 5  # every fifth image, where there is one folder for both
_FORMS = "DIR/train/CLASS/*.png and DIR/val/CLASS/*.png, or DIR/CLASS/*.png"


class _Split(NamedTuple):
    """names: N paths below the directory, labels: their N numbers."""

    names: list[str]
    labels: list[int]


def load(data_dir: str | None, image_size: tuple[int, int, int | None] | None = None) -> Dataset:
    """The images below a directory; classes are numbered in the order of their folders' names.

    x: float32 [N, height, width, channels] in [0, 1]. The most frequent size of the images to
        train on is that of all, and whether more of them are gray (1) or in color (3) decides the
        channels; others are squeezed to it. Headers tell, of up to `LOOKED_AT` images of a split.
        A GIF gives its first frame; transparency is ignored.
    y: int32 [N].

    Images that take at most `MEMORY_SHARE` of the machine's memory, as float32, train and test
    together, are decoded here, once, and stay there; more of them stay files, which are decoded
    while training runs: the same pixels, in the same order. Of the files in a class's folder,
    those ending in .jpg, .jpeg, .png, .gif or .bmp count. In DIR/CLASS, an image's own path
    decides whether it trains or tests: adding others changes nothing about it.

    Args:
        data_dir: the directory.
        image_size: (height, width, channels) in place of the most frequent; channels None: as
            they are most often.

    Raises:
        ValueError: it is missing or cannot be read, has no classes, a class has no images, train
            and test have different classes, or an image cannot be decoded (naming its file): of
            a folder too large for memory, in its turn.
    """
    if data_dir is None:
        raise ValueError(f"dataset=image_folder needs data_dir=DIR, with {_FORMS}.")
    directory = Path(data_dir)
    folders = _folders(directory)
    if TRAIN in folders or set(TESTS) & set(folders):
        classes, train, test = _given_split(directory, folders)
    else:
        classes, train, test = folders, *_hashed_split(directory, folders)
    shape, others = _common_shape(directory, train.names, test.names, image_size)
    note = f"images of {shown(shape)} (height x width x channels)"
    said: dict[str, Any] = {
        "notes": [note], "warnings": others, "class_names": classes, "test_names": test.names,
        "divided": [True],
    }
    train_files, test_files = (
        ImageFiles(directory, split.names, np.array(split.labels, np.int32), shape)
        for split in (train, test)
    )
    if not _fit_into_memory(train_files, test_files):
        return Dataset("image_folder", train_files, test_files, len(classes), shape, **said)
    dataset = from_arrays(
        "image_folder",
        (decode_all(train_files), train_files.labels),
        (decode_all(test_files), test_files.labels),
        (f"{directory} (train)", f"{directory} (test)"),
        len(classes),
    )
    return replace(dataset, **said)


def load_flat(data_dir: str | None, shape: Sequence[int | None]) -> Dataset | None:
    """Images without classes, as the test examples: in the order of their names, labels 0.

    Args:
        data_dir: the directory.
        shape: (height, width, channels) that the model takes; what it leaves open (None), and any
            other number of channels than 1 and 3, is as in the first image.

    Returns:
        None for a directory that holds folders, or no image.

    Raises:
        ValueError: it cannot be read, or the first image cannot be decoded.
    """
    directory = Path(data_dir or "")
    if data_dir is None or any(entry.is_dir() for entry in _entries(directory)):
        return None
    names = _images(directory)
    if not names:
        return None
    found = image_shape(directory / names[0])
    if len(shape) == 3:
        height, width = (size or first for size, first in zip(shape[:2], found, strict=False))
        found = (height, width, shape[2] if shape[2] in (1, 3) else found[2])
    labels = np.zeros(len(names), np.int32)
    files = ImageFiles(directory, names, labels, found, image_files.AT_THE_START)
    return Dataset("image_folder", files, files, 1, found, test_names=names, divided=[True])


def shown(shape: tuple[int, ...]) -> str:
    """"224x224x3", as --image_size has it."""
    return "x".join(map(str, shape))


# Of which size


def _common_shape(
    directory: Path,
    train: Sequence[str],
    test: Sequence[str],
    asked: tuple[int, int, int | None] | None,
) -> tuple[tuple[int, int, int], list[str]]:
    """(height, width, channels) of all images, and a warning where some are of another.

    Raises:
        ValueError: no image to train on can be read.
    """
    if asked is not None and asked[2] is not None:
        return (asked[0], asked[1], asked[2]), []
    shapes = _shapes(directory, train)
    if not shapes:
        image_shape(directory / train[0])  # says why
    ((height, width), _), = Counter(shape[:2] for shape in shapes.values()).most_common(1)
    (channels, _), = Counter(shape[2] for shape in shapes.values()).most_common(1)
    if asked is not None:
        return (asked[0], asked[1], channels), []
    shape = height, width, channels
    shapes |= _shapes(directory, test)
    others = [name for name, found in shapes.items() if found != shape]
    return shape, [_warning(shape, others, shapes, len(train) + len(test))] if others else []


def _warning(
    shape: tuple[int, ...],
    others: Sequence[str],
    shapes: Mapping[str, tuple[int, int, int]],
    num_images: int,
) -> str:
    looked_at = "" if len(shapes) == num_images else f" looked at, of {num_images:,},"
    return (
        f"{len(others):,} of {len(shapes):,} images{looked_at} are not of the most frequent size "
        f"and channels, {shown(shape)}, such as {others[0]} ({shown(shapes[others[0]])}): they are "
        "resized to it, whatever their aspect. image_size=HxWxC names another."
    )


def _shapes(directory: Path, names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    """The shape of each image, or of as many evenly among them, but for what cannot be read."""
    step = max(1, -(-len(names) // LOOKED_AT))
    found, decoded = {}, 0
    for name in names[::step]:
        shape = header_shape(directory / name)
        if shape is None and decoded < _DECODED:  # another kind, or no image, which its turn tells
            decoded += 1
            with suppress(ValueError):
                shape = image_shape(directory / name)
        if shape is not None:
            found[name] = shape
    return found


# Which images


def _given_split(directory: Path, folders: Sequence[str]) -> tuple[list[str], _Split, _Split]:
    tests = [name for name in TESTS if name in folders]
    if TRAIN not in folders or not tests:
        missing = TRAIN if TRAIN not in folders else " or ".join(TESTS)
        raise ValueError(
            f"data_dir ({directory}) holds {', '.join(folders)}, but no folder {missing}; give "
            f"{_FORMS}."
        )
    train_dir, test_dir = directory / TRAIN, directory / tests[0]
    classes, test_classes = _folders(train_dir), _folders(test_dir)
    if classes != test_classes:
        only = sorted(set(classes) ^ set(test_classes))
        raise ValueError(
            f"{train_dir} and {test_dir} have different classes: {', '.join(only)} in only one of "
            "them; give both the same folders."
        )
    train, test = (_all_images(directory, f"{part}/", classes) for part in (TRAIN, tests[0]))
    return classes, train, test


def _hashed_split(directory: Path, classes: Sequence[str]) -> tuple[_Split, _Split]:
    images = _all_images(directory, "", classes)
    train, test = _Split([], []), _Split([], [])
    for name, label in zip(*images, strict=True):
        split = test if _is_test(name) else train
        split.names.append(name)
        split.labels.append(label)
    if not (train.names and test.names):
        raise ValueError(
            f"{directory}: {len(images.names)} images are too few to set every fifth aside for "
            f"testing; add some, or divide them yourself: {_FORMS}."
        )
    return train, test


def _is_test(name: str) -> bool:
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest, "big") % TEST_SHARE == 0


def _all_images(directory: Path, part: str, classes: Sequence[str]) -> _Split:
    """All images in `directory`/`part`CLASS; `part` is empty, or ends in a slash."""
    split = _Split([], [])
    for label, name in enumerate(classes):
        folder = directory / (part + name)
        names = [f"{part}{name}/{image}" for image in _images(folder)]
        if not names:
            raise ValueError(
                f"{folder} holds no image ({', '.join(SUFFIXES)}); add some, or remove the folder."
            )
        split.names.extend(names)
        split.labels.extend([label] * len(names))
    return split


def _images(directory: Path) -> list[str]:
    """The names of its images, sorted."""
    return [
        entry.name
        for entry in _entries(directory)
        if entry.name.lower().endswith(SUFFIXES) and entry.is_file()
    ]


def _folders(directory: Path) -> list[str]:
    """The names of its folders, sorted; at least one."""
    names = [entry.name for entry in _entries(directory) if entry.is_dir()]
    if not names:
        raise ValueError(f"{directory} holds no folder, one for each class; give {_FORMS}.")
    return names


def _entries(directory: Path) -> list[os.DirEntry]:
    """A directory's entries, sorted by name, without hidden ones."""
    try:
        with os.scandir(directory) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(
            f"`data_dir`: {directory} cannot be read: {error.strerror}; give {_FORMS}."
        ) from None
    return sorted(visible, key=lambda entry: entry.name)


def _fit_into_memory(*splits: ImageFiles) -> bool:
    needed = sum(4 * len(split.names) * math.prod(split.shape) for split in splits)
    return fits(needed, MEMORY_SHARE)
