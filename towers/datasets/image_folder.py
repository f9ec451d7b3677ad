"""Images of one's own, one folder a class.

    DIR/train/CLASS/*.png and DIR/val/CLASS/*.png (or DIR/test): a split of one's own
    DIR/CLASS/*.png: 4 of 5 images train, by a hash of CLASS/FILE
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from towers.datasets.arrays import from_arrays
from towers.datasets.dataset import Dataset

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp")
TRAIN, TESTS = "train", ("val", "test")  # val first: a test folder beside it often has no labels
TEST_SHARE = 5  # every fifth image, where there is one folder for both
_FORMS = "DIR/train/CLASS/*.png and DIR/val/CLASS/*.png, or DIR/CLASS/*.png"


class _Split(NamedTuple):
    """paths of N images, labels: their N numbers."""

    paths: list[Path]
    labels: list[int]


def load(data_dir: str | None) -> Dataset:
    """The images below a directory; classes are numbered in the order of their folders' names.

    x: float32 [N, height, width, channels] in [0, 1]. The first image to train on (by class,
        then by name) gives the size and whether all are gray (1) or in color (3); others are
        squeezed to its size. A GIF gives its first frame; transparency is ignored.
    y: int32 [N].

    All images are decoded here, once, and stay in memory. Of the files in a class's folder, those
    ending in .jpg, .jpeg, .png, .gif or .bmp count. In DIR/CLASS, an image's own path decides
    whether it trains or tests: adding others changes nothing about it.

    Args:
        data_dir: the directory.

    Raises:
        ValueError: it is missing or cannot be read, has no classes, a class has no images, train
            and test have different classes, or an image cannot be decoded (naming its file).
    """
    if data_dir is None:
        raise ValueError(f"--dataset=image_folder needs --data_dir=DIR, with {_FORMS}.")
    directory = Path(data_dir)
    folders = _folders(directory)
    if TRAIN in folders or set(TESTS) & set(folders):
        classes, train, test = _given_split(directory, folders)
    else:
        classes, train, test = folders, *_hashed_split(directory, folders)
    shape = _image_shape(train.paths[0])
    _check_memory(directory, len(train.paths) + len(test.paths), shape)
    return from_arrays(
        "image_folder",
        (_decode(train.paths, shape), np.array(train.labels)),
        (_decode(test.paths, shape), np.array(test.labels)),
        (f"{directory} (train)", f"{directory} (test)"),
        len(classes),
    )


# Which images


def _given_split(directory: Path, folders: Sequence[str]) -> tuple[list[str], _Split, _Split]:
    tests = [name for name in TESTS if name in folders]
    if TRAIN not in folders or not tests:
        missing = TRAIN if TRAIN not in folders else " or ".join(TESTS)
        raise ValueError(
            f"--data_dir ({directory}) holds {', '.join(folders)}, but no folder {missing}; give "
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
    return classes, _all_images(train_dir, classes), _all_images(test_dir, classes)


def _hashed_split(directory: Path, classes: Sequence[str]) -> tuple[_Split, _Split]:
    images = _all_images(directory, classes)
    splits = _Split([], []), _Split([], [])
    for path, label in zip(*images, strict=True):
        split = splits[_is_test(f"{classes[label]}/{path.name}")]
        split.paths.append(path)
        split.labels.append(label)
    if not all(split.paths for split in splits):
        raise ValueError(
            f"{directory}: {len(images.paths)} images are too few to set every fifth aside for "
            f"testing; add some, or divide them yourself: {_FORMS}."
        )
    return splits


def _is_test(name: str) -> bool:
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest, "big") % TEST_SHARE == 0


def _all_images(directory: Path, classes: Sequence[str]) -> _Split:
    split = _Split([], [])
    for label, name in enumerate(classes):
        paths = [
            directory / name / entry.name
            for entry in _entries(directory / name)
            if entry.name.lower().endswith(SUFFIXES) and entry.is_file()
        ]
        if not paths:
            raise ValueError(
                f"{directory / name} holds no image ({', '.join(SUFFIXES)}); add some, or remove "
                "the folder."
            )
        split.paths.extend(paths)
        split.labels.extend([label] * len(paths))
    return split


def _folders(directory: Path) -> list[str]:
    """The names of its folders, sorted; at least one."""
    names = [entry.name for entry in _entries(directory) if entry.is_dir()]
    if not names:
        raise ValueError(f"{directory} holds no folder, one for each class; give {_FORMS}.")
    return names


def _entries(directory: Path) -> list[os.DirEntry]:
    """What a directory holds, sorted by name, without what is hidden."""
    try:
        with os.scandir(directory) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(
            f"--data_dir: {directory} cannot be read: {error.strerror}; give {_FORMS}."
        ) from None
    return sorted(visible, key=lambda entry: entry.name)


# Their pixels


def _image_shape(path: Path) -> tuple[int, int, int]:
    """(height, width, 1 or 3) of an image."""
    try:
        image = tf.io.decode_image(path.read_bytes(), expand_animations=False)
    except (OSError, tf.errors.OpError) as error:
        raise _undecodable(path, error) from None
    height, width, channels = image.shape
    return height, width, 1 if channels <= 2 else 3  # 2 and 4: the last one is transparency


def _decode(paths: Sequence[Path], shape: tuple[int, int, int]) -> np.ndarray:
    """float32 [N, *shape] in [0, 1]."""
    x = np.empty((len(paths), *shape), np.float32)
    images = _decoded(paths, shape)
    for index, path in enumerate(paths):
        try:
            np.divide(next(images), np.float32(255), out=x[index])
        except tf.errors.OpError as error:
            raise _undecodable(path, error) from None
    return x


def _decoded(paths: Sequence[Path], shape: tuple[int, int, int]) -> Iterator[np.ndarray]:
    """Pixels 0 ... 255, float32 [*shape], in the order of the paths, decoded on all cores."""

    def decode(path: tf.Tensor) -> tf.Tensor:
        image = tf.io.decode_image(tf.io.read_file(path), shape[2], expand_animations=False)
        image.set_shape([None, None, shape[2]])
        # Squeezing to the same size would only take time.
        image = tf.cond(
            tf.reduce_all(tf.shape(image)[:2] == shape[:2]),
            lambda: tf.cast(image, tf.float32),
            lambda: tf.image.resize(image, shape[:2], antialias=True),
        )
        return tf.ensure_shape(image, shape)

    files = tf.data.Dataset.from_tensor_slices([os.fsencode(path) for path in paths])
    decoded = files.map(decode, tf.data.AUTOTUNE, deterministic=True)
    return iter(decoded.prefetch(1).as_numpy_iterator())


def _undecodable(path: Path, error: Exception) -> ValueError:
    cause = " ".join(str(getattr(error, "message", error)).split())
    # TensorFlow names its operations before the message and after it.
    cause = re.sub(r"\{\{.*?\}\}|.*Iterator::\S+|\[.*", "", cause).strip(" .")
    return ValueError(f"{path} cannot be decoded: {cause}. Convert it to PNG, or remove it.")


def _check_memory(directory: Path, count: int, shape: tuple[int, int, int]) -> None:
    """Raises ValueError where the images, and once more those to train on, would not fit."""
    needed = 2 * 4 * count * int(np.prod(shape))
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ValueError(
            f"{directory}: {count:,} images of {' x '.join(map(str, shape))} need "
            f"{needed / 2**30:,.0f} GiB of memory as float32, but this machine has "
            f"{available / 2**30:,.0f}; make them smaller or fewer."
        )
