"""The model, the data and the configuration that the other scripts of this directory share."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

import towers
from towers.datasets import mnist

GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
GLOBAL_BATCH = 128


def load(examples: int) -> tuple[Any, Any]:
    """Creates the devices; returns (x, y) for training, and a sixth as many for validation."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    data = mnist.load()
    (x, y), (x_test, y_test) = data.train, data.test
    return (x[:examples], y[:examples]), (x_test[: examples // 6], y_test[: examples // 6])


def make_model(learning_rate: float = 0.001, units: int = 64) -> keras.Model:
    """Returns a compiled model: digits float32 [N, 28, 28, 1] -> probabilities [N, 10]."""
    keras.utils.set_random_seed(0)  # for the initial weights; towers.train seeds the rest
    network = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    network.compile(
        keras.optimizers.Adam(learning_rate),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return network


def make_config(**values: Any) -> towers.TrainConfig:
    """Returns the configuration of a run of `towers.train` with these fields."""
    return towers.TrainConfig(num_gpus=DEVICES, batch_size=GLOBAL_BATCH, **values)


def changed_fields(config: towers.TrainConfig) -> dict[str, Any]:
    """Returns the fields of a configuration that differ from the defaults."""
    defaults = dataclasses.asdict(towers.TrainConfig())
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if value != defaults[name]}
