"""The 40 cases of the exactness table: models, losses, optimizers, metrics and custom steps.

No case has noise, because devices may draw other random numbers than one device and still be right.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from benchmarks import exactness_models as models
from benchmarks.exactness_models import FLOAT64, LABELS

L = keras.layers
ops = keras.ops
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Training:
    """A model, its data, and how it is trained.

    group: the kind of thing that the case is about.
    build: makes the model.
    batch: (number of examples, generator) -> (x, y, sample_weight).
    loss: arguments of `compile`.
    examples: number of examples of an epoch; a batch has 8.
    optimizer: {}, or a setting of it: global_clipnorm, accumulate or loss_scale.
    metrics: makes the metrics of `compile`; the logs of the last epoch are compared, too.
    step: None, or the loss of a custom step: (outputs, x, y) -> a number for the whole batch.
    """

    group: str
    build: Callable[[], keras.Model]
    batch: Callable[[int, np.random.Generator], tuple] = models.rows
    loss: dict[str, Any] = field(default_factory=lambda: {"loss": "mse"})
    examples: int = 24
    optimizer: dict[str, Any] = field(default_factory=dict)
    metrics: Callable[[], list] | None = None
    step: Callable[[Any, Any, Any], Any] | None = None


def stack(make: Callable[[], list], inputs: tuple = (6,), dtype: str | None = None) -> Callable:
    """Returns a function that makes a Sequential model of the layers that `make` returns."""
    return lambda: keras.Sequential([keras.Input(inputs, dtype=dtype), *make()])


def hidden(make: Callable[[], list] = list) -> Callable:
    """Returns a function that makes a model with these layers between two dense layers."""
    return stack(lambda: [L.Dense(5, activation="tanh"), *make(), L.Dense(3)])


def images(n: int, rng: np.random.Generator) -> tuple:
    """Images [N, 8, 8, 1] and 4 classes."""
    return rng.normal(size=(n, 8, 8, 1)), rng.integers(0, 4, n), None


def tokens(n: int, rng: np.random.Generator) -> tuple:
    """7 tokens and 3 numbers for each example."""
    return rng.integers(0, 20, (n, 7)), rng.normal(size=(n, 3)), None


def binary(n: int, rng: np.random.Generator) -> tuple:
    """6 numbers, and a label of 0 or 1."""
    return rng.normal(size=(n, 6)), rng.integers(0, 2, (n, 1)).astype(FLOAT64), None


def two_views(n: int, rng: np.random.Generator) -> tuple:
    """Two views of each example, side by side; nothing to predict."""
    return rng.normal(size=(n, 2, 6)), np.zeros((n, 1)), None


def attention() -> keras.Model:
    """Self-attention over padded tokens."""
    x = keras.Input((7,), dtype="int32")
    embedded = L.Embedding(20, 4, mask_zero=True)(x)
    return keras.Model(x, L.Dense(3)(L.MultiHeadAttention(2, 3)(embedded, embedded)))


def partners(y: Any, z: Any) -> Any:
    """Compares each row of z with all rows of y (InfoNCE)."""
    similar = -ops.sum(ops.square(ops.expand_dims(z, 1) - ops.expand_dims(y, 0)), axis=-1)
    own = ops.arange(ops.shape(z)[0])
    return keras.losses.sparse_categorical_crossentropy(own, similar, from_logits=True)


def correlation(y: Any, z: Any) -> Any:
    """1 minus the correlation of predictions and labels over the batch."""
    y, z = y - ops.mean(y), z - ops.mean(z)
    return 1 - ops.mean(y * z) / ops.sqrt(ops.mean(y * y) * ops.mean(z * z))


def plain(outputs: Any, x: Any, y: Any) -> Any:
    """The mean square, as a tutorial writes it."""
    return ops.mean(ops.square(outputs - y))


def weighted(outputs: Any, x: Any, y: Any) -> Any:
    """A mean by weights that follow from the labels."""
    weight = ops.exp(y[:, 0])
    return ops.sum(weight * ops.mean(ops.square(outputs - y), axis=1)) / ops.sum(weight)


def real_tokens(outputs: Any, x: Any, y: Any) -> Any:
    """The mean over the tokens that are no padding."""
    real = ops.cast(x != 0, outputs.dtype)
    return ops.sum(real * ops.mean(ops.square(outputs - y), axis=-1)) / ops.sum(real)


def simclr(outputs: Any, x: Any, y: Any) -> Any:
    """Finds the second view of each example among the second views of the batch."""
    similar = ops.matmul(outputs[:, 0], ops.transpose(outputs[:, 1]))
    own = ops.arange(ops.shape(similar)[0])
    return ops.mean(keras.losses.sparse_categorical_crossentropy(own, similar, from_logits=True))


def teacher_and_student() -> keras.Model:
    """A frozen layer and a trained one, side by side."""
    x = keras.Input((6,))
    teacher = L.Dense(3, trainable=False)
    return keras.Model(x, [teacher(x), L.Dense(3)(L.Dense(5, activation="tanh")(x))])


def distilled(outputs: Any, x: Any, y: Any) -> Any:
    """The divergence of the student's softened probabilities from the teacher's."""
    teacher, student = (ops.softmax(logits / 3.0) for logits in outputs)
    return 9.0 * ops.mean(keras.losses.kl_divergence(teacher, student))


def _mean_of_weights() -> dict[str, Any]:
    return {"loss": models.squared_error("mean_with_sample_weight")}


_SIGMOID = stack(lambda: [L.Dense(4, activation="tanh"), L.Dense(1, activation="sigmoid")])
_VIEWS = stack(lambda: [L.Dense(5, activation="tanh"), L.Dense(3)], inputs=(2, 6))
_GRU = stack(lambda: [L.Embedding(20, 4), L.GRU(4), L.Dense(3)], inputs=(7,), dtype="int32")


def cnn() -> keras.Model:
    """A small network of convolutions."""
    layers = [L.Conv2D(3, 3, activation="relu"), L.MaxPooling2D(), L.Flatten()]
    last = L.Dense(4, activation="softmax")
    return keras.Sequential([keras.Input((8, 8, 1)), *layers, last])


def _batches(examples: int, batch: Callable = models.rows) -> Training:
    return Training("batches", hidden(), batch, examples=examples)


def _model(build: Callable, batch: Callable = models.rows, loss: Any = "mse") -> Training:
    return Training("models", build, batch, {"loss": loss})


def _loss(build: Callable, batch: Callable, **options: Any) -> Training:
    return Training("losses", build, batch, options)


def _optimizer(**options: Any) -> Training:
    return Training("optimizers", hidden(), optimizer=options)


def _metric(make: Callable, build: Callable, batch: Callable, loss: str) -> Training:
    return Training("metrics", build, batch, {"loss": loss}, metrics=make)


def _step(step: Callable, build: Callable, batch: Callable = models.rows) -> Training:
    return Training("custom steps", build, batch, step=step)


def make_cases() -> dict[str, Training]:
    """Returns the cases by name; call it when Keras' float type is set."""
    losses, metrics = keras.losses, keras.metrics
    ignores = losses.SparseCategoricalCrossentropy(ignore_class=3, dtype=FLOAT64)
    two = {"loss": ["mse", LABELS], "loss_weights": [0.3, 2.0]}
    pair = {"pair": models.pair_error, "classes": LABELS}
    return {
        "batches that divide: 8, 8, 8": _batches(24),
        "a smaller last batch that divides: 8, 8, 4": _batches(20),
        "an uneven last batch: 8, 8, 5": _batches(21),
        "a last batch of one example: 8, 8, 1": _batches(17),
        "an uneven last batch with sample weights": _batches(21, models.weighted_rows),
        "convolutions": _model(cnn, images, LABELS),
        "a layer used twice": _model(
            models.shared_layer,
            lambda n, rng: (list(rng.normal(size=(2, n, 6))), rng.normal(size=(n, 3)), None),
        ),
        "an output read four times": _model(models.fan_out),
        "a subclassed model": _model(models.Subclassed),
        "embedding and GRU": _model(_GRU, tokens),
        "GRU over padded tokens": _model(models.masked_gru, models.padded_tokens),
        "attention over padded tokens": _model(attention, models.padded_tokens),
        "LayerNormalization": _model(hidden(lambda: [L.LayerNormalization()])),
        "BatchNormalization, frozen": _model(
            hidden(lambda: [L.BatchNormalization(trainable=False)])
        ),
        "BatchNormalization": _model(hidden(lambda: [L.BatchNormalization()])),
        "BatchNormalization(synchronized=True)": _model(
            hidden(lambda: [L.BatchNormalization(synchronized=True)])
        ),
        "weight regularizers": _model(models.dense(kernel_regularizer="l2", bias_regularizer="l1")),
        "an activity regularizer": _model(
            models.dense(activity_regularizer=keras.regularizers.L2(0.1))
        ),
        "add_loss: a mean and a sum over the batch": _model(hidden(lambda: [models.AddsLosses()])),
        "sample weights": _loss(hidden(), models.weighted_rows, loss="mse"),
        "mean_with_sample_weight": _loss(hidden(), models.weighted_rows, **_mean_of_weights()),
        "weights of both signs": _loss(hidden(), models.balanced_rows, **_mean_of_weights()),
        "a sum of losses": _loss(hidden(), models.weighted_rows, loss=models.squared_error("sum")),
        "a class that is ignored": _loss(
            stack(lambda: [L.Dense(4, activation="softmax")]),
            models.labels_with_ignored,
            loss=ignores,
        ),
        "two outputs with weights": _loss(
            lambda: models.two_outputs(False), models.two_outputs_batch(False), **two
        ),
        "nested outputs, a loss of a pair": _loss(
            models.nested_outputs, models.nested_batch, loss=pair
        ),
        "outputs without a row for each example": _loss(
            models.outputs_without_rows,
            models.batch_without_rows,
            loss={"all": models.error_and_mean},
        ),
        "a contrastive loss": _loss(hidden(), models.rows, loss=partners),
        "Dice over the batch": _loss(_SIGMOID, binary, loss=losses.Dice(dtype=FLOAT64)),
        "a correlation over the batch": _loss(hidden(), models.rows, loss=correlation),
        "clipping by the global norm": _optimizer(global_clipnorm=0.05),
        "gradient accumulation": _optimizer(accumulate=2),
        "a loss scale": _optimizer(loss_scale=8.0),
        "accuracy and AUC": _metric(
            lambda: ["accuracy", metrics.AUC(dtype=FLOAT64)],
            *(_SIGMOID, binary, "binary_crossentropy"),
        ),
        "R2Score": _metric(lambda: [metrics.R2Score(dtype=FLOAT64)], hidden(), models.rows, "mse"),
        "custom step: a mean": _step(plain, hidden()),
        "custom step: a weighted mean": _step(weighted, hidden()),
        "custom step: a mean over real tokens": _step(
            real_tokens, models.masked_gru, models.padded_tokens
        ),
        "custom step: SimCLR": _step(simclr, _VIEWS, two_views),
        "custom step: distillation": _step(distilled, teacher_and_student),
    }
