"""Models and data that the tests and the exactness table share, for every backend of Keras.

They use Keras and numpy alone: TensorFlow, PyTorch or JAX may run them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

L = keras.layers
LABELS = "sparse_categorical_crossentropy"
FLOAT64 = "float64"  # a loss made here is older than the tests' set_floatx


@dataclass(frozen=True)
class Case:
    """A model, its data and the arguments of `compile`.

    build: makes the model.
    batch: (number of examples, generator) -> (x, y, sample_weight).
    """

    name: str
    build: Callable[[], keras.Model]
    batch: Callable[[int, np.random.Generator], tuple]
    compile: dict[str, Any] = field(default_factory=lambda: {"loss": "mse"})

    def __str__(self) -> str:
        return self.name


def rows(n: int, rng: np.random.Generator, inputs: int = 6, outputs: int = 3) -> tuple:
    return rng.normal(size=(n, inputs)), rng.normal(size=(n, outputs)), None


def weighted_rows(n: int, rng: np.random.Generator) -> tuple:
    x, y, _ = rows(n, rng)
    return x, y, rng.uniform(0.1, 3.0, n)


def shared_layer() -> keras.Model:
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    shared = L.Dense(5, activation="tanh")
    return keras.Model([a, b], L.Dense(3)(L.concatenate([shared(a), shared(b)])))


def balanced_rows(n: int, rng: np.random.Generator) -> tuple:
    """Weights that add up to 0 in pairs, but for the last rows'."""
    x, y, weights = weighted_rows(n, rng)
    for i in range(0, n - 2, 2):
        weights[i] = -weights[i + 1]
    return x, y, weights


def fan_out(width: int = 5) -> keras.Model:
    """One output read by two layers and two additions: its gradient has four terms."""
    x = keras.Input((6,))
    hidden = L.Dense(width)(x)
    sums = [L.add([hidden, L.Dense(width)(hidden)]) for _ in range(2)]
    return keras.Model(x, L.Dense(3)(L.concatenate(sums)))


def two_outputs(as_dict: bool) -> keras.Model:
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    hidden = L.Dense(5, activation="relu")(L.concatenate([a, b]))
    numbers = L.Dense(3, name="numbers")(hidden)
    classes = L.Dense(4, activation="softmax", name="classes")(hidden)
    if as_dict:
        return keras.Model({"a": a, "b": b}, {"numbers": numbers, "classes": classes})
    return keras.Model([a, b], [numbers, classes])


def two_outputs_batch(as_dict: bool) -> Callable:
    def batch(n: int, rng: np.random.Generator) -> tuple:
        x = {"a": rng.normal(size=(n, 6)), "b": rng.normal(size=(n, 4))}
        y = {"numbers": rng.normal(size=(n, 3)), "classes": rng.integers(0, 4, n)}
        weight = {"numbers": rng.uniform(0.1, 3.0, n), "classes": rng.uniform(0.1, 3.0, n)}
        if as_dict:
            return x, y, weight
        return tuple(x.values()), tuple(y.values()), tuple(weight.values())

    return batch


def nested_outputs() -> keras.Model:
    x = keras.Input((6,))
    hidden = L.Dense(5, activation="tanh")(x)
    pair = [L.Dense(3, name="first")(hidden), L.Dense(3, name="second")(hidden)]
    return keras.Model(x, {"pair": pair, "classes": L.Dense(4, activation="softmax")(hidden)})


def nested_batch(n: int, rng: np.random.Generator) -> tuple:
    x, classes, _ = labels_with_ignored(n, rng)
    y = {"pair": list(rng.normal(size=(2, n, 3))), "classes": classes}
    return x, y, rng.uniform(0.1, 3.0, n)


def pair_error(y_true: Any, y_pred: Any) -> Any:
    """A loss of two outputs at once: by how much the product of two predictions is wrong."""
    return keras.ops.mean(keras.ops.abs(y_true[0] * y_true[1] - y_pred[0] * y_pred[1]), axis=-1)


def outputs_without_rows() -> keras.Model:
    x = keras.Input((6,))
    hidden = L.Dense(5, activation="tanh")(x)
    mean, total = keras.ops.mean(keras.ops.square(hidden)), keras.ops.sum(hidden, axis=0)
    return keras.Model(x, {"all": [L.Dense(3)(hidden), mean, total]})


def batch_without_rows(n: int, rng: np.random.Generator) -> tuple:
    x, y, _ = rows(n, rng)
    return x, {"all": [y, y[:, 0], y[:, 0]]}, None  # Keras wants labels for each output


def error_and_mean(y_true: Any, y_pred: Any) -> Any:
    """A loss of rows, and of a mean over the rows."""
    return keras.ops.mean(keras.ops.abs(y_true[0] - y_pred[0])) + 0.3 * y_pred[1]


def masked_gru() -> keras.Model:
    x = keras.Input((None,), dtype="int32")
    hidden = L.GRU(4, return_sequences=True)(L.Embedding(20, 4, mask_zero=True)(x))
    return keras.Model(x, L.Dense(3)(hidden))


def padded_tokens(n: int, rng: np.random.Generator) -> tuple:
    x = rng.integers(1, 20, (n, 7))
    x[np.arange(7)[None, :] >= rng.integers(1, 8, n)[:, None]] = 0
    return x, rng.normal(size=(n, 7, 3)), None


def dense(**options: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        hidden = L.Dense(5, activation="tanh", **options)
        return keras.Sequential([keras.Input((6,)), hidden, L.Dense(3)])

    return build


class AddsLosses(keras.layers.Layer):
    """A layer that adds a batch mean, a sum over the rows, and a value for each row to the loss."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.3 * keras.ops.mean(keras.ops.square(x)))
        self.add_loss(0.02 * keras.ops.sum(keras.ops.square(x)))
        self.add_loss(0.3 * keras.ops.mean(keras.ops.abs(x), axis=1))  # which Keras adds up
        return x


class Subclassed(keras.Model):
    """A subclassed model whose `call` does not pass `training` on."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = L.Dense(5, activation="tanh")
        self.last = L.Dense(3)
        self(np.zeros((1, 6)))  # builds it

    def call(self, x: Any) -> Any:
        return self.last(self.hidden(x))


def labels_with_ignored(n: int, rng: np.random.Generator) -> tuple:
    y = rng.integers(0, 4, n)
    y[1::3] = 3
    return rng.normal(size=(n, 6)), y, None


def squared_error(reduction: str) -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction=reduction, dtype=FLOAT64)
