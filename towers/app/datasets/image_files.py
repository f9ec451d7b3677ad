"""Decodes image files while training runs.

TensorFlow decodes JPEG, PNG and GIF. Pillow reads headers, and decodes the files that TensorFlow
cannot decode, cannot convert to gray, or would not turn upright.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from towers.app.datasets.tf_data import cause
from towers.machine.devices import count_cores
from towers.resume.source import DataSource, Epoch, ExplainedBatches, as_written, of_examples

Shape = tuple[int, int, int]

_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L")  # Pillow's modes of gray images
_GRAY = ("1", "L", "LA", *_SIXTEEN_BITS)


@dataclass(frozen=True, eq=False)
class ImageFiles(DataSource):
    """Reads a split of N images that stay files and are decoded while training runs.

    directory: the directory of the files.
    names: the N paths below the directory.
    labels: int32 [N].
    shape: (height, width, channels); each image is resized to it.
    """

    directory: Path
    names: list[str]
    labels: np.ndarray
    shape: Shape

    how = "decoded while training runs"

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        return len(self.names)

    def identity(self) -> Iterator[bytes]:
        """Yields names, file sizes and labels. Raises ValueError if a size cannot be read."""
        for name, label in zip(self.names, self.labels, strict=True):
            path = self.directory / name
            try:
                size = os.path.getsize(path)
            except OSError as error:
                raise _undecodable(path, error) from None
            yield os.fsencode(f"{name}\0{size} {label}\0")

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """Returns batches whose images are decoded on all cores, one image on each core."""
        with tf.device("/cpu:0"):
            labels = tf.constant(self.labels)

        @as_written
        def image(index: tf.Tensor) -> tuple[tf.Tensor, Any]:
            pixels = tf.numpy_function(self._pixels, [index], tf.float32, stateful=False)
            return index, (tf.ensure_shape(pixels, self.shape), labels[index])

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
        return decode(self.directory / self.names[index], self.shape)


def image_shape(path: Path) -> Shape:
    """Returns (height, width, 1 or 3) of an image turned upright, from its header.

    Raises:
        ValueError: the file cannot be read or has no header of an image.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            # For a TIFF file, Pillow has already exchanged them.
            if _orientation(image) >= 5 and image.format != "TIFF":
                width, height = height, width
            return height, width, 1 if image.mode in _GRAY and image.format != "GIF" else 3
    except Exception as error:  # Pillow raises many types of errors for a damaged file
        raise _undecodable(path, error) from None


def decode(path: Path, shape: Shape) -> np.ndarray:
    """Decodes a file to float32 [height, width, channels] in [0, 1], resized to `shape`.

    Raises:
        ValueError: the file cannot be decoded; the error names it.
    """
    try:
        with tf.device("/cpu:0"):
            pixels = _decoded(path, shape[2])
            if tuple(pixels.shape[:2]) != shape[:2]:
                pixels = tf.image.resize(pixels, shape[:2], antialias=True)
            return np.divide(pixels, np.float32(255), dtype=np.float32)
    except Exception as error:  # TensorFlow and Pillow raise many types of errors
        raise _undecodable(path, error) from None


def _decoded(path: Path, channels: int) -> Any:
    """Decodes a file to [height, width, channels], uint8 or float32, from 0 to 255."""
    with Image.open(path) as image:
        kind, mode, is_upright = image.format, image.mode, _orientation(image) == 1
        # TensorFlow does not turn images upright, and cannot convert these kinds to gray.
        is_refused = channels == 1 and (kind == "GIF" or mode == "CMYK")
        if kind in ("JPEG", "MPO", "PNG", "GIF") and is_upright and not is_refused:
            has_16_bits = kind == "PNG" and "16" in str(image.tile[0][3])  # such as "RGB;16B"
            dtype = tf.uint16 if has_16_bits else tf.uint8
            contents = tf.io.read_file(str(path))
            pixels = tf.io.decode_image(contents, channels, dtype, expand_animations=False)
            return tf.cast(pixels, tf.float32) / 257 if has_16_bits else pixels
        image.load()
        upright = image if is_upright else ImageOps.exif_transpose(image)
    if upright.mode in _SIXTEEN_BITS:
        gray = np.asarray(upright).astype(np.float32)[..., np.newaxis] / 257
        return np.repeat(gray, channels, axis=2)
    if upright.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers without a known range")
    pixels = np.asarray(upright.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def _orientation(image: Image.Image) -> int:
    """Returns EXIF's orientation: 1 is upright; from 5 on, height and width are exchanged."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # getexif() would decode the whole file to find EXIF data at its end
    with suppress(Exception):  # damaged EXIF data are ignored, as image viewers do
        return max(1, int(image.getexif().get(ExifTags.Base.Orientation, 1)))
    return 1


def _undecodable(path: Path, error: Exception) -> ValueError:
    unknown = isinstance(error, UnidentifiedImageError)
    why = "it is no image that TensorFlow or Pillow knows" if unknown else cause(error)
    return ValueError(
        f"{path} cannot be decoded: {why}. Convert it to PNG, or remove it. A run that has begun "
        "can resume only with the old file."
    )
