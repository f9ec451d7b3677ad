"""Models that every property is tried on: the built-in ones, and odd ones.

A case's model has no randomness and no BatchNormalization in training mode: those make towers and
the large batch differ by design, and have tests of their own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.exactness_models import (
    AddsLosses,
    Case,
    FLOAT64,
    LABELS,
    Subclassed,
    balanced_rows,
    batch_without_rows,
    dense,
    error_and_mean,
    fan_out,
    labels_with_ignored,
    masked_gru,
    nested_batch,
    nested_outputs,
    outputs_without_rows,
    padded_tokens,
    pair_error,
    rows,
    squared_error,
    two_outputs,
    two_outputs_batch,
    weighted_rows,
)
from towers.app import models
from towers.app.models import builtin

L = keras.layers


def without_randomness(model: keras.Model) -> keras.Model:
    """Dropout rates 0 and BatchNormalization frozen, so that a shard's result is its rows' own."""
    for layer in model.layers:
        if isinstance(layer, L.Dropout):
            layer.rate = 0.0
        if isinstance(layer, L.BatchNormalization):
            if not np.any(layer.gamma):  # the convolutions before it would have no gradient
                layer.gamma.assign(np.full(layer.gamma.shape, 0.5))
            layer.trainable = False
    return model


# The built-in models, by name: (input_shape, num_classes) -> model. Where size only takes time,
# smaller ones, of the same code; resnet and resnet56 are resnet20 with other numbers of blocks.
BUILDERS: dict[str, Callable[[tuple[int, ...], int], keras.Model]] = {
    "cnn": models.load("cnn").build,
    "notebook_cnn": models.load("notebook_cnn").build,
    "mlp": models.load("mlp").build,
    "gru": partial(builtin.rnn, "gru", L.GRU, num_layers=2, units=6, dense_units=8),
    "lstm": partial(builtin.rnn, "lstm", L.LSTM, num_layers=2, units=6, dense_units=8),
    "resnet20": partial(builtin.build_small, "resnet20", num_blocks=1),
    "resnet50": partial(builtin.build_bottlenecks, "resnet50", num_blocks=(2, 1), filters=4),
}


def _built_in(name: str) -> Case:
    shape, classes = (12, 12, 1), 10

    def batch(n: int, rng: np.random.Generator) -> tuple:
        return rng.normal(size=(n, *shape)), rng.integers(0, classes, n), None

    return Case(
        name, lambda: without_randomness(BUILDERS[name](shape, classes)), batch, {"loss": LABELS}
    )


class WithPositions(L.Layer):
    """One table, looked up by rows and, alike in all towers, by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = L.Embedding(20, 4)

    def build(self, shape: tuple) -> None:
        self.table.build(shape)

    def call(self, x: Any) -> Any:
        return self.table(x) + self.table(tf.range(tf.shape(x)[1]))


def _embedding() -> keras.Model:
    x = keras.Input((7,), dtype="int32")
    return keras.Model(x, L.Dense(3)(L.Flatten()(WithPositions()(x))))


class RowMean(L.Layer):
    """The mean over a ragged axis; 0 for a row without values."""

    def compute_output_shape(self, shape: tuple) -> tuple:
        return shape[0], shape[2]

    def call(self, x: Any) -> Any:
        lengths = tf.cast(tf.maximum(x.row_lengths(), 1), x.dtype)
        return tf.reduce_sum(x, axis=1) / lengths[:, tf.newaxis]


def _ragged() -> keras.Model:
    x = keras.Input((None,), dtype="int32", ragged=True)
    return keras.Model(x, L.Dense(3)(RowMean()(L.Embedding(20, 4)(x))))


def _ragged_tokens(n: int, rng: np.random.Generator) -> tuple:
    lengths = rng.integers(0, 6, n) * (n != 3)  # in a batch of 3 all rows are empty
    tokens = rng.integers(0, 20, lengths.sum()).astype("int32")
    return tf.RaggedTensor.from_row_lengths(tokens, lengths), rng.normal(size=(n, 3)), None


def _ragged_output() -> keras.Model:
    x = keras.Input((None,), dtype="int32", ragged=True)
    return keras.Model(x, L.Embedding(20, 1)(x))


def _ragged_labels(n: int, rng: np.random.Generator) -> tuple:
    x, _, _ = _ragged_tokens(n, rng)
    y = x.with_flat_values(tf.constant(rng.normal(size=(len(x.flat_values), 1))))
    return x, y, rng.uniform(0.1, 3.0, n)


def row_error(y_true: Any, y_pred: Any) -> Any:
    """A loss function between ragged rows: the sum of squares of each."""
    return tf.reduce_sum(tf.square(y_true - y_pred), axis=[1, 2])


def _sparse() -> keras.Model:
    words, numbers = keras.Input((6,), sparse=True, name="words"), keras.Input((2,), name="numbers")
    hidden = L.Concatenate()([L.Dense(4)(words), numbers])
    return keras.Model({"words": words, "numbers": numbers}, L.Dense(3)(hidden))


def _sparse_rows(n: int, rng: np.random.Generator) -> tuple:
    words = rng.normal(size=(n, 6)) * (rng.random((n, 6)) < 0.4) * (n != 3)  # of 3 all are empty
    x = {"words": tf.sparse.from_dense(words), "numbers": rng.normal(size=(n, 2))}
    return x, rng.normal(size=(n, 3)), rng.uniform(0.1, 3.0, n)


class Noise(L.Layer):
    """Adds noise that a function of its input draws."""

    def __init__(self, draw: Callable) -> None:
        super().__init__()
        self.draw = draw

    def call(self, x: Any) -> Any:
        return x + self.draw(x)


def drawn(x: Any) -> Any:
    return tf.random.normal(tf.shape(x), dtype=x.dtype)


# Noise by tf.random, in the functions that a graph calls, too.
NOISE: dict[str, Callable] = {
    "drawn": drawn,
    "in_function": tf.function(drawn, autograph=False),
    "in_branch": lambda x: tf.cond(tf.size(x) > 0, lambda: drawn(x), lambda: x),
    "in_loop": lambda x: tf.while_loop(
        lambda i, _: i < 2, lambda i, sums: (i + 1, sums + drawn(x)), [0, tf.zeros_like(x)]
    )[1],
    "mapped": lambda x: tf.map_fn(drawn, x),
}


def noisy(name: str) -> keras.Model:
    """A model with a layer of `NOISE`."""
    return keras.Sequential([keras.Input((6,)), L.Dense(5), Noise(NOISE[name]), L.Dense(3)])


BUILT_IN = [_built_in(name) for name in BUILDERS]

ODD = [
    Case("fan_out", fan_out, rows),
    Case(
        "two_outputs",
        lambda: two_outputs(False),
        two_outputs_batch(False),
        {"loss": ["mse", LABELS], "loss_weights": [0.3, 2.0]},
    ),
    Case(
        "two_outputs_dict",
        lambda: two_outputs(True),
        two_outputs_batch(True),
        {
            "loss": {"numbers": squared_error("mean_with_sample_weight"), "classes": LABELS},
            "loss_weights": {"numbers": 0.3, "classes": 2.0},
        },
    ),
    Case(
        "nested_outputs",
        nested_outputs,
        nested_batch,
        {
            "loss": {
                "pair": pair_error,
                "classes": [
                    "crossentropy",
                    keras.losses.SparseCategoricalCrossentropy(ignore_class=3, dtype=FLOAT64),
                ],
            },
        },
    ),
    Case(
        "outputs_without_rows",
        outputs_without_rows,
        batch_without_rows,
        {"loss": {"all": error_and_mean}},
    ),
    Case(
        "embedding",
        _embedding,
        lambda n, rng: (rng.integers(0, 20, (n, 7)), rng.normal(size=(n, 3)), None),
    ),
    Case("ragged", _ragged, _ragged_tokens),
    Case("ragged_output", _ragged_output, _ragged_labels, {"loss": row_error}),
    Case("sparse", _sparse, _sparse_rows),
    Case(
        "notes",
        lambda: without_randomness(BUILDERS["gru"]((7,), 20)),
        lambda n, rng: (rng.integers(0, 20, (n, 7)), rng.integers(0, 20, n), None),
        {"loss": LABELS},
    ),
    Case("masked_gru", masked_gru, padded_tokens),
    Case(
        "layer_norm",
        lambda: keras.Sequential(
            [keras.Input((6,)), L.Dense(5), L.LayerNormalization(), L.Dense(3)]
        ),
        rows,
    ),
    Case("l2", dense(kernel_regularizer="l2", bias_regularizer="l1"), rows),
    Case("activity", dense(activity_regularizer=keras.regularizers.L2(0.1)), rows),
    Case(
        "adds_loss",
        lambda: keras.Sequential([keras.Input((6,)), L.Dense(5), AddsLosses(), L.Dense(3)]),
        rows,
    ),
    Case("sample_weight", dense(), weighted_rows),
    Case(
        "mean_with_sample_weight",
        dense(),
        weighted_rows,
        {"loss": squared_error("mean_with_sample_weight")},
    ),
    Case(
        "weights_of_both_signs",
        dense(),
        balanced_rows,
        {"loss": squared_error("mean_with_sample_weight")},
    ),
    Case("sum", dense(), weighted_rows, {"loss": squared_error("sum")}),
    Case("subclassed", Subclassed, rows),
    Case(
        "ignore_class",
        lambda: keras.Sequential([keras.Input((6,)), L.Dense(4, activation="softmax")]),
        labels_with_ignored,
        {
            "loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=3, dtype=FLOAT64),
        },
    ),
]
