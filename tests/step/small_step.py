"""A small classifier's step and batches, and the graphs that TensorFlow makes of a step."""

import unittest.mock

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import towers
from towers.divide.facts import OWN
from towers.divide.rule import RULES

L = keras.layers


def dense():
    return [
        keras.Input((6,)),
        L.Dense(33, activation="relu"),
        L.BatchNormalization(),
        L.Dropout(0.3),
        L.Dense(3, activation="softmax"),
    ]


def plain():
    return [keras.Input((6,)), L.Dense(3, activation="softmax")]


def make_step(num_devices=2, layers=dense, optimizer="sgd", **options):
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        return towers.TowerStep(
            keras.Sequential(layers()),
            optimizer,
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **{"devices": [f"/cpu:{i}" for i in range(num_devices)], "num_towers": 4, **options},
        )


def batch(count):
    generator = np.random.default_rng(0)
    return generator.normal(size=(count, 6)).astype("float32"), generator.integers(0, 3, count)


def called_in_towers(function):
    """A context: each Snapshot is a call of a function by each tower; a layer's call runs once."""

    def emit(context, op, values):
        (x,) = values
        called = tf.numpy_function(function, [x], x.dtype, stateful=False)
        return [tf.ensure_shape(called, x.shape)]

    def rule(look):
        return look.each([OWN], look.fact(0), emit=emit)

    return unittest.mock.patch.dict(RULES, Snapshot=rule)


def partition_graphs(act):
    """The optimized GraphDefs of what `act` is the first to run: for each function and device."""
    metadata = context.context()
    metadata.ensure_initialized()
    metadata.enable_run_metadata()
    metadata.export_run_metadata()  # what others have left there
    act()
    functions = metadata.export_run_metadata().function_graphs
    metadata.disable_run_metadata()
    return [graph for function in functions for graph in function.partition_graphs]
