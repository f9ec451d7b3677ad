"""What the header of an image says is what TensorFlow decodes; anything else is None."""

import numpy as np
import pytest
import tensorflow as tf

from tests.datasets.image_folder_test import BAD, BMP, GIF
from towers.datasets.image_files import image_shape
from towers.datasets.image_headers import header_shape


def encoded(encode, channels, **options):
    """Not before it is called: that starts TensorFlow."""
    pixels = np.random.default_rng(0).integers(0, 256, (7, 300, channels), np.uint8)
    return lambda: encode(pixels, **options).numpy()


IMAGES = {
    **{f"png {n}": encoded(tf.io.encode_png, n) for n in (1, 2, 3, 4)},
    **{f"jpeg {n}": encoded(tf.io.encode_jpeg, n) for n in (1, 3)},
    "jpeg progressive": encoded(tf.io.encode_jpeg, 3, progressive=True),
    "jpeg with a comment": encoded(tf.io.encode_jpeg, 3, xmp_metadata="x" * 60_000),
    "gif": lambda: GIF,
    "bmp": lambda: BMP,
}


@pytest.mark.parametrize("kind", IMAGES)
def test_a_header_says_what_tensorflow_decodes(kind, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(IMAGES[kind]())
    assert header_shape(path) == image_shape(path)


@pytest.mark.parametrize("content", [*BAD[:4], b"\xff\xd8\xff\xe0\0\1"])
def test_what_is_no_image_or_ends_too_early_says_nothing(content, tmp_path):
    path = tmp_path / "image"
    path.write_bytes(content)
    assert header_shape(path) is None
    path.write_bytes(IMAGES["jpeg 3"]()[:100])
    assert header_shape(path) is None


def test_a_file_that_is_not_there_says_nothing(tmp_path):
    assert header_shape(tmp_path / "none") is None
