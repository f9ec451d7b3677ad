"""Trains a small network on some of MNIST's digits, on two devices, for the scripts beside it."""

import dataclasses
from typing import Any

import keras
import tensorflow as tf

import towers
from towers.datasets import mnist

GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without a GPU: logical CPU devices
GLOBAL_BATCH = 128


def load(examples: int) -> tuple[Any, Any]:
    """The first (x, y) to train on, and a sixth of their number to validate on."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    data = mnist.load()
    (x, y), (x_test, y_test) = data.train, data.test
    return (x[:examples], y[:examples]), (x_test[: examples // 6], y_test[: examples // 6])


def model(learning_rate: float = 0.001, units: int = 64) -> keras.Model:
    """Digits float32 [n, 28, 28, 1] -> probabilities float32 [n, 10], compiled with Adam."""
    keras.utils.set_random_seed(0)  # of the values that it begins with; a run seeds the rest
    network = keras.Sequential([
        keras.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(units, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ])
    network.compile(
        keras.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return network


def config(**values: Any) -> towers.TrainConfig:
    """A run of `towers.train` on the same devices, with the same global batch."""
    return towers.TrainConfig(num_gpus=DEVICES, batch_size=GLOBAL_BATCH, **values)


def given(config: towers.TrainConfig) -> dict[str, Any]:
    """Returns the fields of a configuration that are not defaults, for a tracker's parameters."""
    defaults = dataclasses.asdict(towers.TrainConfig())
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if value != defaults[name]}
