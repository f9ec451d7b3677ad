"""Image files -> pixels: all into memory at the start, or each one when its turn comes."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf

from towers.machine.devices import count_cores

AT_THE_START = "Convert it to PNG, or remove it."
_IN_ITS_TURN = (
    "Convert it to PNG or remove it, and start a new run; `resume` takes only the file as it was."
)


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
    shape: tuple[int, int, int]
    way_out: str = _IN_ITS_TURN

    @property
    def paths(self) -> list[bytes]:
        """As TensorFlow takes them."""
        return [os.fsencode(f"{self.directory}/{name}") for name in self.names]

    def sizes(self) -> Iterator[int]:
        """The bytes of each file. Raises ValueError when one cannot be looked at."""
        for path in self.paths:
            try:
                yield os.path.getsize(path)
            except OSError as error:
                raise _undecodable(path, error, AT_THE_START) from None


def image_shape(path: Path) -> tuple[int, int, int]:
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


def decode(path: tf.Tensor, shape: tuple[int, int, int]) -> tf.Tensor:
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


def check_decodable(files: ImageFiles, indices: Iterable[int]) -> None:
    """Decodes some of the files once more, in this order, when one of them has failed in training.

    Raises:
        ValueError: an image cannot be decoded (naming its file).
    """
    paths = files.paths
    for index in indices:
        try:
            decode(tf.constant(paths[index]), files.shape)
        except tf.errors.OpError as error:
            raise _undecodable(paths[index], error, files.way_out) from None


def _undecodable(path: bytes, error: Exception, way_out: str) -> ValueError:
    cause = " ".join(str(getattr(error, "message", error)).split())
    # TensorFlow names its operations before the message and after it.
    cause = re.sub(r"\{\{.*?\}\}|.*Iterator::\S+|\[.*", "", cause).strip(" .")
    return ValueError(f"{os.fsdecode(path)} cannot be decoded: {cause}. {way_out}")
