"""Errors of Keras and of kernels stay as they are; a batch size in the code is an error."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers

L = keras.layers
ROWS, BATCH = 8, 4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 6)).astype("float32"), RNG.normal(size=(ROWS, 3)).astype("float32")
LABELS = "sparse_categorical_crossentropy"


def error_of(model, *data):
    with pytest.raises(Exception) as caught:  # noqa: PT011  (every case has another class)
        model.fit(*data, batch_size=BATCH, verbose=0)
    return caught.value


def told(error):
    """Returns the first line of a message, for any number of rows."""
    return re.sub(r"\[(\?|4),|\((None|4),", "[n,", str(error).strip().split("\n")[0])


@pytest.mark.parametrize(("loss", "x", "y"), [
    ("mse", X[:, :5], Y), ("mse", X, X), ("mse", X, None), ("no_such_loss", X, Y), (LABELS, X, Y),
    (None, X, Y), ("mse", X, {"unknown": Y}), (LABELS, X, np.full(ROWS, 7)), ("mse", X, Y[:5]),
], ids=[
    "wrong input", "wrong shape", "no labels", "unknown loss", "labels of the wrong rank",
    "no loss", "unknown output", "a label out of range", "missing rows",
])  # fmt: skip
def test_an_error_of_keras_stays_as_on_one_device(loss, x, y):
    def model():
        return keras.Sequential([keras.Input((6,)), L.Dense(3, name="dense")], name="model")

    plain, parallel = model(), towers.make_parallel(model(), 2, num_towers=3)
    for each in (plain, parallel):
        each.compile("sgd", loss)
    ours, theirs = error_of(parallel, x, y), error_of(plain, x, y)
    assert (type(ours), told(ours)) == (type(theirs), told(theirs))


class Fixed(keras.Layer):
    """Calls a function with the batch size written into it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


FIXED = {
    "ensure_shape": lambda x: tf.ensure_shape(x, [BATCH, 6]),
    "reshape": lambda x: tf.reshape(x, [BATCH, 6]),
    "ones": lambda x: x * tf.ones([BATCH, 1]),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_batch_size_in_the_code_is_an_error_with_its_line(name):
    model = keras.Sequential([keras.Input((6,)), Fixed(FIXED[name]), L.Dense(3)])
    model.compile("sgd", "mse")
    model.fit(X, Y, BATCH, verbose=0)  # Keras accepts it
    error = error_of(towers.make_parallel(model, 2), X, Y)
    line = FIXED[name].__code__.co_firstlineno
    assert isinstance(error, ValueError)
    assert str(error).startswith(f"divided_step_test.py:{line} works for one batch size alone")
    assert str(error).endswith("Take it from the data: tf.shape(x)[0].")


@pytest.mark.parametrize("rows", [ROWS, ROWS - 1])
def test_an_input_with_a_batch_size_works_as_in_keras(rows):
    def history(parallel):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input(batch_shape=(BATCH, 6)), L.Flatten(), L.Dense(3)])
        model = towers.make_parallel(model, 2, num_towers=3) if parallel else model
        model.compile("sgd", "mse")
        return model.fit(X[:rows], Y[:rows], BATCH, verbose=0, shuffle=False).history["loss"]

    np.testing.assert_allclose(history(True), history(False), 1e-6)
