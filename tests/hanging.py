"""Models, data and callbacks that hang for ever, each after some steps."""

import os
import threading

import keras
import numpy as np
import tensorflow as tf

import towers

NEVER = threading.Event()
NUM_CLASSES = 3  # of `sleepy_data`


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
            NEVER.wait()
        return np.eye(3, dtype="float32")[index % 3], index % 3


def sleepy_data():
    return Source(hangs=60), Source()


def deaf_callbacks():
    return [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: NEVER.wait())]


def blocked_disk():
    """After the first step, no file of this process is flushed to the disk any more."""
    def block(batch, logs):
        os.fsync = lambda descriptor: NEVER.wait()

    return [keras.callbacks.LambdaCallback(on_train_batch_end=block)]


class LostDevice(keras.layers.Layer):
    """A layer whose operation does not come back for the fourth batch."""

    calls = 0

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


if __name__ == "__main__":  # a parallel model's fit, a callback of which hangs
    towers.logical_cpus(2)
    parallel = towers.make_parallel(model((3,), 3), 2)
    parallel.compile("sgd", "sparse_categorical_crossentropy")
    parallel.fit(*data()[0], batch_size=16, epochs=2, verbose=0,
                 callbacks=[*deaf_callbacks(), towers.HangTimeout(2)])
