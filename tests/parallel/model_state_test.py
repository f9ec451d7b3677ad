"""The iterators of Keras' loops are dropped in a thread, where nobody waits for them."""

import threading
import weakref

import keras
import numpy as np
import tensorflow as tf

import towers

DROPPED = "towers-drop"


def test_no_epoch_waits_until_its_iterator_is_gone(monkeypatch):
    dropped_in, make = [], tf.data.Dataset.__iter__

    def recorded(self):
        iterator = make(self)
        weakref.finalize(iterator, lambda: dropped_in.append(threading.current_thread().name))
        return iterator

    monkeypatch.setattr(tf.data.Dataset, "__iter__", recorded)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model = towers.make_parallel(model, 2)
    model.compile("sgd", "mse")
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    model.fit(x, y, batch_size=4, epochs=3, validation_data=(x, y), verbose=0)
    for thread in threading.enumerate():
        if thread.name == DROPPED:
            thread.join()
    # Keras makes another one for each loop, which it does not read.
    assert dropped_in.count(DROPPED) == 3 + 3  # training and validation
