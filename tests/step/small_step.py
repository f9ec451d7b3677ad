"""A step of a small classifier with BatchNormalization and dropout, and its batches."""

import keras
import numpy as np
import tensorflow as tf

import towers

L = keras.layers


def dense():
    return [keras.Input((6,)), L.Dense(33, activation="relu"), L.BatchNormalization(),
            L.Dropout(0.3), L.Dense(3, activation="softmax")]


def make_step(num_devices=2, layers=dense, optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        return towers.TowerStep(
            keras.Sequential(layers()), optimizer, "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **{"devices": [f"/cpu:{i}" for i in range(num_devices)], "num_towers": 4, **options},
        )


def batch(count):
    generator = np.random.default_rng(0)
    return generator.normal(size=(count, 6)).astype("float32"), generator.integers(0, 3, count)
