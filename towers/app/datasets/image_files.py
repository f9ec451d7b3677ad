"""Image files -> pixels: all into memory at the start, or each one when its turn comes.

TensorFlow decodes JPEG, PNG and GIF. Pillow reads headers, and decodes the files that TensorFlow
cannot decode, or would turn into other colors or leave on their side.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from towers.resume.source import Epoch, ExplainedBatches, InputOptions, as_written, of_examples
from towers.machine.devices import count_cores

Shape = tuple[int, int, int]

_REMEDY = "Convert it to PNG, or remove it. A run that has begun can resume only with the old file."
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L")  # Pillow's modes of gray images
_GRAY = ("1", "L", "LA", *_SIXTEEN_BITS)


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """N images that stay files: a split that is decoded while training runs.

    directory: where they are.
    names: their paths below it.
    labels: int32 [N].
    shape: (height, width, channels) that each of them gets.
    """

    directory: Path
    names: list[str]
    labels: np.ndarray
    shape: Shape

    how = "decoded while training runs"
    is_sequential = False

    @property
    def num_examples(self) -> int:
        return len(self.names)

    @property
    def paths(self) -> list[bytes]:
        """The paths as TensorFlow takes them."""
        return [os.fsencode(f"{self.directory}/{name}") for name in self.names]

    def opened(self, options: InputOptions) -> "ImageFiles":
        return self

    def identity(self) -> Iterator[bytes]:
        """Their names, sizes and labels. Raises ValueError when a file cannot be looked at."""
        for name, path, label in zip(self.names, self.paths, self.labels, strict=True):
            try:
                size = os.path.getsize(path)
            except OSError as error:
                raise _undecodable(path, error) from None
            yield os.fsencode(f"{name}\0{size} {label}\0")

    def batches(self, epoch: Epoch) -> ExplainedBatches:
        """Decoded on all cores, one image by each."""
        with tf.device("/cpu:0"):
            paths, labels = tf.constant(self.paths), tf.constant(self.labels)

        @as_written
        def image(index: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return index, (decode(paths[index], self.shape), labels[index])

        indices = epoch.indices(self.num_examples)
        # AUTOTUNE would end each epoch later.
        images = indices.unbatch().map(image, count_cores(), deterministic=True)
        return ExplainedBatches(of_examples(images, epoch), partial(self._explained, indices))

    def _explained(self, indices: tf.data.Dataset, batches: tf.data.Dataset) -> Iterator[Any]:
        """The batches; decodes the one that has failed once more, file by file.

        Args:
            indices: of each batch.
            batches: of images.

        Raises:
            ValueError: an image cannot be decoded (naming its file).
        """
        done = 0
        try:
            for batch in batches:
                yield batch
                done += 1
        except tf.errors.OpError:  # it does not tell the file
            for index in next(indices.skip(done).as_numpy_iterator()):
                path = self.paths[index]
                try:
                    decode(tf.constant(path), self.shape)
                except Exception as error:  # Pillow raises many kinds for a damaged file
                    raise _undecodable(path, error) from None
            raise

    def decoded(self) -> np.ndarray:
        """The pixels of all files, float32 [N, *shape]; raises ValueError as `batches` does."""
        x = np.empty((self.num_examples, *self.shape), np.float32)
        for place, (pixels, _) in zip(x, self.batches(Epoch(1)), strict=True):
            place[...] = pixels[0]
        return x


def image_shape(path: Path) -> Shape:
    """(height, width, 1 or 3) of an upright image, from its header.

    Raises:
        ValueError: the file holds no such header.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            # Pillow has exchanged them for a TIFF file already.
            if _orientation(image) >= 5 and image.format != "TIFF":
                width, height = height, width
            return height, width, 1 if image.mode in _GRAY and image.format != "GIF" else 3
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise _undecodable(os.fsencode(path), error) from None


def decode(path: tf.Tensor, shape: Shape) -> tf.Tensor:
    """The pixels of one file, float32 [height, width, channels] in [0, 1]; squeezed to `shape`."""
    contents, channels = tf.io.read_file(path), shape[2]
    by_tensorflow = partial(tf.io.decode_image, contents, channels, expand_animations=False)
    decoder, by_pillow = partial(_decoder, channels), partial(_decode_by_pillow, channels)
    image = tf.switch_case(tf.numpy_function(decoder, [path], tf.int32, stateful=False), [
        lambda: tf.cast(by_tensorflow(), tf.float32),
        lambda: tf.cast(by_tensorflow(tf.uint16), tf.float32) / 257,
        lambda: tf.numpy_function(by_pillow, [path], tf.float32, stateful=False),
    ])
    image.set_shape([None, None, channels])
    # Squeezing to the same size would only take time.
    image = tf.cond(
        tf.reduce_all(tf.shape(image)[:2] == shape[:2]),
        lambda: image,
        lambda: tf.image.resize(image, shape[:2], antialias=True),
    )
    return tf.ensure_shape(image, shape) / 255


def _decoder(channels: int, path: Any) -> np.int32:
    """0: TensorFlow decodes the file, as 8 bits. 1: TensorFlow, as 16 bits. 2: Pillow."""
    # TensorFlow says what is wrong with a damaged header.
    with suppress(Exception), Image.open(_name(path)) as image:
        kind = image.format
        # TensorFlow leaves images on their side, and refuses to make these gray.
        is_refused = channels == 1 and (kind == "GIF" or image.mode == "CMYK")
        if kind not in ("JPEG", "MPO", "PNG", "GIF") or _orientation(image) > 1 or is_refused:
            return np.int32(2)
        return np.int32(kind == "PNG" and "16" in str(image.tile[0][3]))  # such as "RGB;16B"
    return np.int32(0)


def _decode_by_pillow(channels: int, path: Any) -> np.ndarray:
    """The pixels of one file, float32 [height, width, channels] from 0 to 255."""
    with Image.open(_name(path)) as image:
        image.load()
        upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
    if upright.mode in _SIXTEEN_BITS:
        gray = np.asarray(upright).astype(np.float32)[..., np.newaxis] / 257
        return np.repeat(gray, channels, axis=2)
    if upright.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers without a known range")
    pixels = np.asarray(upright.convert("L" if channels == 1 else "RGB"), np.float32)
    return pixels.reshape(*pixels.shape[:2], channels)


def _name(path: Any) -> str:
    """A path that TensorFlow hands to Python."""
    return os.fsdecode(np.asarray(path).item())


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation: 1 is upright; from 5 on, height and width are exchanged."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # else Pillow would decode the whole file to look at its end
    with suppress(Exception):  # damaged EXIF data, which viewers ignore
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


def _undecodable(path: bytes, error: Exception) -> ValueError:
    cause = " ".join(str(getattr(error, "message", error)).split())
    # TensorFlow names its operations before the message and after it.
    cause = re.sub(r"\{\{.*?\}\}|.*Iterator::\S+|\[.*", "", cause).strip(" .")
    if isinstance(error, UnidentifiedImageError):
        cause = "it is no image that TensorFlow or Pillow knows"
    return ValueError(f"{os.fsdecode(path)} cannot be decoded: {cause}. {_REMEDY}")
