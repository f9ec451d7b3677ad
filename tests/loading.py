"""What the tests of the data sets share."""

import keras
import pytest

from towers.app import datasets
from towers.app.config import TrainConfig


def load(name, data_dir=None):
    """A data set by name; "synthetic" has this shape and so many classes."""
    return datasets.load(name, data_dir, input_shape=(3, 2), num_classes=4)


def refusal(function, *args):
    """The one line of the ValueError that a call raises."""
    with pytest.raises(ValueError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def model(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dropout(0.2),
        keras.layers.Dense(num_classes, activation="softmax"),
    ])


def config(run_dir, dataset, **values):
    """A run of two epochs."""
    small = {"model": "tests.loading:model", "num_gpus": 2, "num_towers": 2, "batch_size": 5,
             "epochs": 2, "run_dir": str(run_dir), "dataset": dataset}
    return TrainConfig(**{**small, **values})


def final_weights(run_dir):
    """The bytes of each."""
    model = keras.saving.load_model(run_dir / "final.keras")
    return [variable.numpy().tobytes() for variable in model.weights]
