"""What the tests of the data sets share."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.app import datasets
from towers.app.config import TrainConfig
from towers.app.datasets.image_folder import ImageFiles
from towers.app.datasets.random_access import split_of


def load(name, data_dir=None):
    """A data set by name; "synthetic" has this shape and so many classes."""
    return datasets.load(name, data_dir, input_shape=(3, 2), num_classes=4)


def refusal(function, *args):
    """The one line of the ValueError that a call raises."""
    with pytest.raises(ValueError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def in_each_form(source, num_classes, directory):
    """The images of a random-access source, their labels, and each form as which data may come."""
    pixels, y = zip(*(source[index] for index in range(len(source))), strict=True)
    x, y = np.stack(pixels) / np.float32(255), np.array(y, np.int32)
    names = [f"{index}.png" for index in range(len(y))]
    for name, image in zip(names, pixels, strict=True):
        (directory / name).write_bytes(tf.io.encode_png(image).numpy())
    return {
        "arrays": (x, y),
        "image files": ImageFiles(directory, names, y, x.shape[1:]),
        "a source": split_of(source, "here", num_classes, custom_loss=False)[0],
        "tf.data": tf.data.Dataset.from_tensor_slices((x, y)),
    }


def write_pixels(path, pixels):
    """Writes a PNG or JPEG file."""
    encode = tf.io.encode_png if path.suffix == ".png" else tf.io.encode_jpeg
    path.write_bytes(encode(pixels.astype(np.uint8)).numpy())


def model(input_shape, num_classes):
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(num_classes, activation="softmax"),
        ]
    )


def config(run_dir, dataset, **values):
    """A run of two epochs."""
    small = {
        "model": "tests.loading:model",
        "num_gpus": 2,
        "num_towers": 2,
        "batch_size": 5,
        "epochs": 2,
        "run_dir": str(run_dir),
        "dataset": dataset,
    }
    return TrainConfig(**{**small, **values})


def final_weights(run_dir):
    """The bytes of each."""
    model = keras.saving.load_model(run_dir / "final.keras")
    return [variable.numpy().tobytes() for variable in model.weights]
