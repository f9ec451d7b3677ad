"""What the tests of make_parallel share: the same run by Keras on one device, and on towers."""

from typing import NamedTuple

import keras
import numpy as np

import towers

L = keras.layers
TOLERANCE = 1e-9  # relative, in float64: rounding of another order of additions


class Pair(NamedTuple):
    """One model by Keras, and one with the same initial values on towers."""

    theirs: keras.Model
    ours: keras.Model


def build_pair(build, num_towers=3, **compile_arguments):
    """Two compiled models. Compile arguments that are functions are called once for each."""

    def make():
        keras.utils.set_random_seed(5)
        return build()

    pair = Pair(make(), towers.make_parallel(make(), 2, num_towers=num_towers))
    # Sooner than traced, to the same values; but of several losses, each one's mean over batches
    # counts their examples only eagerly.
    has_one_loss = not isinstance(compile_arguments["loss"], list | dict)
    eagerly = has_one_loss and "steps_per_execution" not in compile_arguments
    for model in pair:
        is_reference = model is pair.theirs
        jit = {"jit_compile": False} if is_reference else {}  # XLA would take most of the time
        model.compile(
            run_eagerly=eagerly and is_reference,
            **jit,
            **{
                key: value() if key in ("optimizer", "metrics", "weighted_metrics") else value
                for key, value in compile_arguments.items()
            },
        )
    return pair


def fit_pair(pair, data, **options):
    """Fits both; `data()` gives the positional arguments of `fit`. Returns both histories."""
    histories = []
    for model in pair:
        keras.utils.set_random_seed(11)  # the order of the examples
        made = {k: v() if callable(v) else v for k, v in options.items()}
        histories.append(model.fit(*data(), verbose=0, **made).history)
    return histories


def assert_same_logs(ours, theirs):
    """The same entries in the same order, and the same values."""
    assert list(ours) == list(theirs)
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=TOLERANCE, err_msg=name)


def assert_close(ours, theirs, rtol=TOLERANCE, atol=1e-12):
    """Each of these variables or arrays agrees with that of the same place."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(a, b, rtol, atol, err_msg=getattr(a, "path", f"{i}"))


def assert_same_weights(pair):
    """Weights and optimizer slots agree."""
    assert_close(*([*m.variables, *m.optimizer.variables] for m in (pair.ours, pair.theirs)))


def assert_same_fit(pair, data, **options):
    """Histories and weights agree after `fit`; returns the history."""
    theirs, ours = fit_pair(pair, data, **options)
    assert_same_logs(ours, theirs)
    assert_same_weights(pair)
    return ours


class Own(keras.Sequential):
    """A step of the model's own, which is Keras'."""

    def train_step(self, data):
        return super().train_step(data)


def classifier():
    """6 numbers -> 3 classes."""
    return keras.Sequential(
        [keras.Input((6,)), L.Dense(8, activation="tanh"), L.Dense(3, activation="softmax")]
    )


CLASSIFIER = {
    "optimizer": lambda: "adam",
    "loss": "sparse_categorical_crossentropy",
    "metrics": lambda: ["accuracy"],
}


def rows(count=31):
    """x [N, 6], y [N]: in batches of 7 the last one holds 3 examples."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 6)), rng.integers(0, 3, count)


def batches(batch_size=7, count=31):
    """`rows` as a generator of batches, without end."""
    x, y = rows(count)
    while True:
        for begin in range(0, count, batch_size):
            yield x[begin : begin + batch_size], y[begin : begin + batch_size]
