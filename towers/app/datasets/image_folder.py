"""Loads the user's images from a directory, and decodes them while training runs.

DIR/train/CLASS/*.png and DIR/val/CLASS/*.png (or DIR/test): the user's split
DIR/CLASS/*.png: 4 of 5 images train, chosen by a hash of CLASS/FILE
DIR/*.png: no classes; a trained model predicts these images

Pillow decodes the images. It releases Python's lock meanwhile, so that all cores decode.
"""

import hashlib
import io
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any, BinaryIO, NoReturn

import numpy as np
import tensorflow as tf
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from towers.app.datasets.dataset import Dataset, fits
from towers.machine.devices import count_cores
from towers.machine.files import RefusedError, open_to_read, read
from towers.machine.words import printable
from towers.app.datasets.source import DataSource, ExplainedBatches, of_examples
from towers.resume.epoch import Epoch, as_written

Shape = tuple[int, int, int]

LARGEST_IMAGE = 2**30  # bytes of a file; the pixels that Pillow accepts take less
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L")  # Pillow's modes of gray images
_GRAY = ("1", "L", "LA", *_SIXTEEN_BITS)


@dataclass(frozen=True, eq=False)
class ImageFiles(DataSource):
    """Reads a split of N images from files, which are decoded while training runs."""

    directory: Path
    names: list[str]  # N paths below `directory`
    labels: np.ndarray  # int32 [N]
    shape: Shape  # (height, width, channels); each image is resized to it

    how = "decoded while training runs"
    reads_rows = True

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        return len(self.names)

    def identity(self) -> Iterator[bytes]:
        """Yields names, file sizes and labels."""
        for name, label in zip(self.names, self.labels, strict=True):
            yield os.fsencode(f"{name}\0{os.path.getsize(self.directory / name)} {label}\0")

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """Returns batches whose images are decoded on all cores, one image on each core."""
        with tf.device("/cpu:0"):
            labels = tf.constant(self.labels)

        @as_written
        def image(index: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
            pixels = tf.numpy_function(self._pixels, [index], tf.float32, stateful=False)
            return index, (tf.ensure_shape(pixels, self.shape), labels[tf.maximum(index, ~index)])

        indices = epoch.indices(self.num_examples)
        # With AUTOTUNE, each epoch would take longer.
        images = indices.unbatch().map(image, count_cores(), deterministic=True)

        def explain(num_done: int) -> None:
            for index in next(indices.skip(num_done).as_numpy_iterator()):
                self._pixels(index)  # raises an error that names the file; TensorFlow's does not

        return ExplainedBatches(of_examples(images, epoch), explain)

    def decoded(self) -> np.ndarray:
        """Decodes all files to float32 [N, *shape]. Raises ValueError if one cannot be decoded."""
        with ThreadPoolExecutor(count_cores()) as pool:
            return np.stack(list(pool.map(self._pixels, range(self.num_examples))))

    def _pixels(self, index: int) -> np.ndarray:
        if index < 0:  # another worker needs it
            return np.zeros(self.shape, np.float32)
        return decode(self.directory / self.names[index], self.shape)


def image_shape(path: Path) -> Shape:
    """Returns (height, width, 1 or 3) of an upright image, from its header; raises ValueError."""
    try:
        with open_to_read(path, follow=True) as file, _opened(file) as image:
            width, height = image.size
            # For a TIFF file, Pillow has already exchanged them.
            if _orientation(image) >= 5 and image.format != "TIFF":
                width, height = height, width
            if image.mode in _GRAY and image.format != "GIF":
                return height, width, 1
            return height, width, 3
    except Exception as error:  # Pillow raises many types of errors for a damaged file
        raise _undecodable(path, error) from None


def decode(path: Path, shape: Shape) -> np.ndarray:
    """Decodes a file to float32 `shape` in [0, 1], resized; raises ValueError, which names it."""
    height, width, channels = shape
    try:
        contents = read(path, LARGEST_IMAGE, follow=True)
        with _opened(io.BytesIO(contents)) as image:
            is_upright = _orientation(image) == 1
            image.load()
            upright = image if is_upright else ImageOps.exif_transpose(image)
        if upright.mode in ("I", "F"):
            raise ValueError("its pixels are 32-bit numbers without a known range")
        if upright.mode in _SIXTEEN_BITS:
            plain, largest = upright.convert("F"), 65_535
        else:
            plain, largest = upright.convert("L" if channels == 1 else "RGB"), 255
        if plain.size != (width, height):
            # As in Keras' image_dataset_from_directory: bilinear; with smoothing if it shrinks.
            plain = plain.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(plain).reshape(height, width, -1)
        divided = np.divide(pixels, np.float32(largest), dtype=np.float32)
        return np.ascontiguousarray(np.broadcast_to(divided, shape))
    except Exception as error:  # Pillow raises many types of errors for a damaged file
        raise _undecodable(path, error) from None


def _orientation(image: Image.Image) -> int:
    """Returns EXIF's orientation: 1 is upright; from 5 on, height and width are exchanged."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # getexif() would decode the whole file to find EXIF data at its end
    with suppress(Exception):  # damaged EXIF data are ignored, as image viewers do
        return max(1, int(image.getexif().get(ExifTags.Base.Orientation, 1)))
    return 1


def _opened(file: BinaryIO) -> Image.Image:
    """Opens an image of one of `SUFFIXES`. For PostScript, Pillow would start another program."""
    Image.init()
    known = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
    return Image.open(file, formats=[name for name in known if name in Image.OPEN])


def _undecodable(path: Path, error: Exception) -> ValueError:
    why = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, UnidentifiedImageError):
        why = "it is no image that Pillow knows"
    elif isinstance(error, RefusedError):
        why = str(error.strerror)
    name = printable(path)
    return ValueError(f"{name} cannot be decoded: {why}. Convert it to PNG, or remove it.")


SUFFIXES = tuple(
    ".jpg .jpeg .jpe .jfif .png .gif .bmp .webp .tif .tiff .avif .jp2 .ppm .pgm .pbm".split()
)
# The first of TESTS that exists is used: a test folder beside val often has no labels.
TRAIN, TESTS = "train", ("val", "valid", "validation", "test")
LOOKED_AT = 10_000  # images of a split whose headers are read: less than a second
TEST_SHARE = 5  # every fifth image is a test image if there are no train and test folders
_FORMS = "DIR/train/CLASS/*.png and DIR/val/CLASS/*.png, or DIR/CLASS/*.png"

_Images = dict[str, int]  # path below the directory -> label


def load(data_dir: str | None, image_size: tuple[int, int, int | None] | None = None) -> Dataset:
    """Loads images below a directory; classes are numbered in the order of their folders' names.

    x: float32 [N, height, width, channels] in [0, 1]; images of another size are resized to it.
    y: int32 [N]. If x takes more than a quarter of the memory, the files are decoded while training
    runs, to the same bits.

    image_size: (height, width, channels); channels are 1 (gray), 3 (color) or None. None takes the
        most frequent value, from the headers of up to `LOOKED_AT` training images.
    """
    if data_dir is None:
        raise ValueError(f"dataset=image_folder needs data_dir=DIR, with {_FORMS}.")
    directory, left_out = Path(data_dir), Counter[str]()
    classes, train, test = _find(directory, left_out)
    shape, warnings = _common_shape(directory, list(train), image_size)
    splits: list[Any] = []
    for images, what in ((train, "train"), (test, "test")):
        labels = np.array(list(images.values()), np.int32)
        splits.append(ImageFiles(directory, list(images), labels, shape))
        if without := sorted({*range(len(classes))} - {*images.values()}):
            warnings.append(
                f"{len(without):,} of {len(classes):,} classes have no image to {what} on, such as "
                f"{classes[without[0]]}. Add some, or give {_FORMS}."
            )
    if fits(4 * math.prod(shape) * (len(train) + len(test))):
        splits = [(files.decoded(), files.labels) for files in splits]
    return Dataset(
        "image_folder",
        splits[0],
        splits[1],
        len(classes),
        shape,
        notes=[f"images of {describe_shape(shape)} (height x width x channels)"],
        warnings=[*warnings, *_unused(directory, left_out)],
        class_names=classes,
        test_names=list(test),
        divided=[True],
    )


def load_flat(data_dir: str | None, shape: Sequence[int | None]) -> Dataset | None:
    """Loads images without classes as test examples with label 0, in the order of their names.

    Returns None if the directory holds folders or no image. shape: (height, width, channels) of the
    model's input. None, and channels other than 1 and 3, are replaced by the first image's value.
    """
    directory, left_out = Path(data_dir or ""), Counter[str]()
    if data_dir is None or _folders(directory):
        return None
    if not (names := list(_images(directory, "", [""], left_out))):
        return None
    found = _known_or(shape, image_shape(directory / names[0]))
    files = ImageFiles(directory, names, np.zeros(len(names), np.int32), found)
    return Dataset(
        "image_folder",
        files,
        files,
        1,
        found,
        test_names=names,
        divided=[True],
        warnings=_unused(directory, left_out),
    )


def _known_or(shape: Sequence[int | None], first: Shape) -> Shape:
    """Returns the model's (height, width, channels), with the first image's for what is open."""
    if len(shape) != 3:
        return first
    height, width, channels = shape
    return height or first[0], width or first[1], channels if channels in (1, 3) else first[2]


def describe_shape(shape: Iterable[int]) -> str:
    """Returns a shape as --image_size takes it, such as "224x224x3"."""
    return "x".join(map(str, shape))


def _common_shape(
    directory: Path, names: Sequence[str], asked: tuple[int, int, int | None] | None
) -> tuple[Shape, list[str]]:
    """Returns (height, width, channels) for all images, and a warning if some images differ."""
    if asked is not None and asked[2] is not None:
        return (*asked[:2], asked[2]), []
    shapes = {n: image_shape(directory / n) for n in names[:: -(-len(names) // LOOKED_AT)]}
    channels = mode(shape[2] for shape in shapes.values())
    if asked is not None:
        return (*asked[:2], channels), []
    shape = (*mode(shape[:2] for shape in shapes.values()), channels)
    others = [name for name, found in shapes.items() if found != shape]
    if not others:
        return shape, []
    return shape, [
        f"{len(others):,} of {len(shapes):,} training images do not have the most frequent size and "
        f"channels, {describe_shape(shape)}, such as {others[0]} "
        f"({describe_shape(shapes[others[0]])}). They are resized. To choose another size, set "
        "image_size=HxWxC."
    ]


def _find(directory: Path, left_out: Counter[str]) -> tuple[list[str], _Images, _Images]:
    """Returns the classes, the training images and the test images; counts unused files."""
    folders = _folders(directory)
    if not folders:
        raise ValueError(f"{directory} holds no folder, one for each class; give {_FORMS}.")
    train, test = _parts(folders)
    if train and test:
        classes = _folders(directory / train)
        if only := sorted(set(classes) ^ set(_folders(directory / test))):
            raise ValueError(
                f"data_dir ({directory}): {train} and {test} have different classes: "
                f"{', '.join(only)} in only one of them; give both the same folders."
            )
        images = _images(directory, train, classes, left_out)
        return classes, images, _images(directory, test, classes, left_out)
    if train or test:
        raise ValueError(
            f"data_dir ({directory}) holds {', '.join(folders)}, but no folder "
            f"{TRAIN if test else ' or '.join(TESTS)}; give {_FORMS}."
        )
    for folder in folders:
        if all(_parts(_folders(directory / folder))):
            raise ValueError(
                f"data_dir ({directory}): its folder {folder} holds images to train and to test "
                f"on; use data_dir={directory / folder}, or give {_FORMS}."
            )
    splits: tuple[_Images, _Images] = {}, {}
    for name, label in _images(directory, "", folders, left_out).items():
        digest = hashlib.sha256(os.fsencode(name)).digest()
        splits[int.from_bytes(digest, "big") % TEST_SHARE == 0][name] = label
    if not all(splits):
        raise ValueError(
            f"{directory} holds too few images to test on every fifth; add some, or give {_FORMS}."
        )
    return folders, *splits


def _parts(folders: Sequence[str]) -> tuple[str | None, str | None]:
    """Returns the names of the train folder and the test folder, or None; case is ignored."""
    named = {name.lower(): name for name in folders}
    return named.get(TRAIN), next((named[name] for name in TESTS if name in named), None)


def _images(directory: Path, part: str, classes: list[str], left_out: Counter[str]) -> _Images:
    """Finds all images below `directory`/`part`/CLASS, in Keras' order; counts other files."""
    top, images = directory / part, _Images()
    if classes != [""]:
        _, _, beside = next(os.walk(top))
        left_out["beside the classes' folders"] += len(_image_files(beside, left_out))
    for label, name in enumerate(classes):
        found = []
        # As in Keras, this may be a link; a link below it is not followed, or it could loop.
        for root, folders, files in os.walk(top / name, onerror=_raise):
            folders[:] = _visible(folders)
            left_out["links to folders"] += sum(os.path.islink(f"{root}/{f}") for f in folders)
            below = os.path.relpath(root, top / name).removeprefix(".")
            found += [(below, file) for file in _image_files(files, left_out)]
        if name and not found:
            raise ValueError(
                f"{top / name} holds no image ({', '.join(SUFFIXES)}); add some, or remove the "
                f"folder. {' '.join(_unused(directory, left_out))}"
            )
        for place in sorted(found):
            images[os.path.join(part, name, *place)] = label
    return images


def _image_files(names: Iterable[str], left_out: Counter[str]) -> list[str]:
    """Returns the names of images; counts other files, but for hidden ones."""
    found = []
    for name in _visible(names):
        suffix = os.path.splitext(name)[1].lower()
        if suffix in SUFFIXES:
            found.append(name)
        else:
            left_out[suffix or "without a suffix"] += 1
    return found


def _visible(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _folders(directory: Path) -> list[str]:
    """Returns the sorted names of a directory's folders, without hidden ones."""
    _, folders, _ = next(os.walk(directory, onerror=_raise))
    return _visible(folders)


def _raise(error: OSError) -> NoReturn:
    raise ValueError(f"data_dir ({error.filename}): {error.strerror}; give {_FORMS}.")


def _unused(directory: Path, left_out: Counter[str]) -> list[str]:
    """Returns a warning such as "DIR holds files that are not used: .heic (1)."; or nothing."""
    listed = ", ".join(f"{what} ({count:,})" for what, count in sorted(left_out.items()) if count)
    if not listed:
        return []
    return [f"{directory} holds files that are not used: {listed}."]
