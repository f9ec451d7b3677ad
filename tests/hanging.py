"""Models, data and callbacks that hang for ever, each after some steps."""

import os
import threading

import keras
import numpy as np
import tensorflow as tf

import towers

NEVER = threading.Event()
NUM_CLASSES = 3


def data():
    y = np.arange(64) % 3
    return (np.eye(3, dtype="float32")[y], y), (np.eye(3, dtype="float32"), np.arange(3))


class Source:
    """Examples, one of which may never come."""

    def __init__(self, hangs=None):
        self.hangs = hangs

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.hangs:
            read_from_a_disk_that_is_gone()
        return np.eye(3, dtype="float32")[index % 3], index % 3


def read_from_a_disk_that_is_gone():
    NEVER.wait()


def sleepy_data():
    return Source(hangs=60), Source()


class Deaf(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        NEVER.wait()


def deaf_callbacks():
    return [Deaf()]


class BlockedDisk(keras.callbacks.Callback):
    """After the first step, no file of this process is flushed to the disk any more."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            os.fsync = block


def block(descriptor):
    NEVER.wait()


def blocked_disk():
    return [BlockedDisk()]


class LostDevice(keras.layers.Layer):
    """A layer whose operation does not come back for the fourth batch."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.calls = 0

    def call(self, x):
        def answer(value):
            self.calls += 1
            if self.calls > 6:  # 2 towers
                NEVER.wait()
            return value

        answered = tf.numpy_function(answer, [tf.stop_gradient(x)], x.dtype)
        return x + 0 * tf.ensure_shape(answered, x.shape)


def lost_device(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape), LostDevice(), keras.layers.Dense(num_classes)
    ])


def model(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape), keras.layers.Dense(num_classes, activation="softmax")
    ])


def fit():
    """A parallel model's fit, a callback of which hangs."""
    towers.logical_cpus(2)
    parallel = towers.make_parallel(model((3,), 3), 2)
    parallel.compile("sgd", "sparse_categorical_crossentropy")
    (x, y), _ = data()
    callbacks = [Deaf(), towers.HangTimeout(2)]
    parallel.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    fit()
