"""Trains a model with two inputs and shared layers: do two images show the same digit?

    python -m examples.two_inputs

The test accuracy is about 0.95 after 4 epochs.
"""

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
PAIRS = 20_000
GLOBAL_BATCH = 256
EPOCHS = 4


def build() -> keras.Model:
    """Two images float32 [N, 28, 28, 1] -> the probability of the same digit, float32 [N, 1]."""
    encoder = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            L.Conv2D(16, 3, strides=2, activation="relu"),
            L.Conv2D(32, 3, strides=2, activation="relu"),
            L.Flatten(),
            L.Dense(64),
        ],
        name="encoder",
    )
    left, right = keras.Input((28, 28, 1), name="left"), keras.Input((28, 28, 1), name="right")
    a, b = encoder(left), encoder(right)
    difference = keras.ops.abs(a - b)
    hidden = L.Dense(64, activation="relu")(L.concatenate([difference, a * b]))
    return keras.Model([left, right], L.Dense(1, activation="sigmoid")(hidden))


def make_pairs(x: np.ndarray, y: np.ndarray, count: int) -> tuple[list, np.ndarray]:
    """Returns random pairs and their labels; at least half of the pairs show the same digit."""
    rng = np.random.default_rng(0)
    by_digit = [np.flatnonzero(y == digit) for digit in range(10)]
    left = rng.integers(0, len(y), count)
    same = rng.random(count) < 0.5
    right = np.where(
        same, [rng.choice(by_digit[y[i]]) for i in left], rng.integers(0, len(y), count)
    )
    return [x[left], x[right]], (y[left] == y[right]).astype("float32")


def main(pairs: int = PAIRS, epochs: int = EPOCHS) -> dict[str, list[float]]:
    """Trains and evaluates; returns the history of `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    data = mnist.load()
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        model = build()
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return parallel.fit(
        *make_pairs(*data.train, pairs),
        batch_size=GLOBAL_BATCH,
        epochs=epochs,
        verbose=2,
        validation_data=make_pairs(*data.test, pairs // 4),
    ).history


if __name__ == "__main__":
    main()
