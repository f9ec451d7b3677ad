"""Image files -> pixels: all into memory at the start, or each one when its turn comes.

How large an image is, its header tells: PNG, JPEG, GIF, BMP -> (height, width, 1 or 3 channels).
"""

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from towers.datasets.source import Epoch, ExplainedBatches, InputOptions, as_written, of_examples
from towers.machine.devices import count_cores

Shape = tuple[int, int, int]

AT_THE_START = "Convert it to PNG, or remove it."
_IN_ITS_TURN = (
    "Convert it to PNG or remove it, and start a new run; `resume` takes only the file as it was."
)

_ENOUGH = 32  # bytes: where PNG, GIF and BMP say it
_GRAY_PNG = (0, 4)  # color types: gray, and gray with transparency
# JPEG's frame headers, which say it; 0xC4, 0xC8 and 0xCC are no frames (ITU T.81, table B.1).
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ALONE = {0x01, *range(0xD0, 0xD9)}  # markers without a length


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """N images that stay files: a split that is decoded while training runs.

    directory: where they are.
    names: their paths below it.
    labels: int32 [N].
    shape: (height, width, channels) that each of them gets.
    way_out: what to do with a file that turns out to be no image.
    """

    directory: Path
    names: list[str]
    labels: np.ndarray
    shape: Shape
    way_out: str = _IN_ITS_TURN

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
                raise _undecodable(path, error, AT_THE_START) from None
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
            paths = self.paths
            for index in next(indices.skip(done).as_numpy_iterator()):
                try:
                    decode(tf.constant(paths[index]), self.shape)
                except tf.errors.OpError as error:
                    raise _undecodable(paths[index], error, self.way_out) from None
            raise


def image_shape(path: Path) -> Shape:
    """(height, width, 1 or 3) of an image.

    Raises:
        ValueError: it cannot be decoded.
    """
    try:
        image = tf.io.decode_image(path.read_bytes(), expand_animations=False)
    except (OSError, tf.errors.OpError) as error:
        raise _undecodable(os.fsencode(path), error, AT_THE_START) from None
    height, width, channels = image.shape
    return height, width, 1 if channels <= 2 else 3  # 2 and 4: the last one is transparency


def decode(path: tf.Tensor, shape: Shape) -> tf.Tensor:
    """The pixels of one file, float32 [height, width, channels] in [0, 1]; squeezed to `shape`."""
    image = tf.io.decode_image(tf.io.read_file(path), shape[2], expand_animations=False)
    image.set_shape([None, None, shape[2]])
    # Squeezing to the same size would only take time.
    image = tf.cond(
        tf.reduce_all(tf.shape(image)[:2] == shape[:2]),
        lambda: tf.cast(image, tf.float32),
        lambda: tf.image.resize(image, shape[:2], antialias=True),
    )
    return tf.ensure_shape(image, shape) / 255


def decode_all(files: ImageFiles) -> np.ndarray:
    """The pixels of all files, float32 [N, *shape], decoded on all cores.

    Raises:
        ValueError: an image cannot be decoded (naming its file).
    """
    paths = files.paths
    x = np.empty((len(paths), *files.shape), np.float32)
    decoded = tf.data.Dataset.from_tensor_slices(paths).map(
        lambda path: decode(path, files.shape), count_cores(), deterministic=True
    )
    images = decoded.prefetch(1).as_numpy_iterator()
    for index, path in enumerate(paths):
        try:
            x[index] = next(images)
        except tf.errors.OpError as error:
            raise _undecodable(path, error, AT_THE_START) from None
    return x


def _undecodable(path: bytes, error: Exception, way_out: str) -> ValueError:
    cause = " ".join(str(getattr(error, "message", error)).split())
    # TensorFlow names its operations before the message and after it.
    cause = re.sub(r"\{\{.*?\}\}|.*Iterator::\S+|\[.*", "", cause).strip(" .")
    return ValueError(f"{os.fsdecode(path)} cannot be decoded: {cause}. {way_out}")


# Headers: the first bytes of a file, of which nothing is decoded


def header_shape(path: Path) -> Shape | None:
    """The shape in a file's header; None where it cannot be read, or is of no known kind."""
    try:
        with path.open("rb") as file:
            head = file.read(_ENOUGH)
            shape = _jpeg(file) if head.startswith(b"\xff\xd8") else _fixed(head)
    except (OSError, struct.error):
        return None
    return shape if shape is not None and min(shape) > 0 else None


def _fixed(head: bytes) -> Shape | None:
    """The shape in a PNG, GIF or BMP header, where it has a fixed place."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height, _, color = struct.unpack_from(">IIBB", head, 16)
        return height, width, 1 if color in _GRAY_PNG else 3
    if head.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", head, 6)
        return height, width, 3
    if head.startswith(b"BM"):
        width, height, _, bits = struct.unpack_from("<iiHH", head, 18)
        return abs(height), width, 1 if bits == 8 else 3  # TensorFlow takes 8 bits for gray
    return None


def _jpeg(file: BinaryIO) -> Shape | None:
    """The shape in a JPEG header, behind segments of a marker, a length and that many bytes."""
    file.seek(2)
    while True:
        fill, marker = struct.unpack(">BB", file.read(2))
        if fill != 0xFF:
            return None
        while marker == 0xFF:
            (marker,) = struct.unpack(">B", file.read(1))
        if marker in _ALONE:
            continue
        (length,) = struct.unpack(">H", file.read(2))
        if marker in _FRAMES:
            _, height, width, channels = struct.unpack(">BHHB", file.read(6))
            return height, width, 1 if channels == 1 else 3
        if length < 2:
            return None
        file.seek(length - 2, 1)
