"""Losses and layers that read more than their rows: those of all towers, weights, variables.

Each model is trained by Keras on one device and by towers, in float64, without a warning.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.parallel.pairs import assert_same_logs

L = keras.layers
RNG = np.random.default_rng(3)
X, Y, WEIGHTS = RNG.normal(size=(16, 4)), RNG.normal(size=(16, 2)), RNG.uniform(size=16)
MISSING = np.where(RNG.uniform(size=Y.shape) < np.linspace(1, 0, 16)[:, np.newaxis], -1.0, Y)


def network(kind=keras.Sequential, **options):
    keras.utils.set_random_seed(1)
    return kind([keras.Input((4,)), L.Dense(2, **options)])


def masked(y, y_pred):
    known = tf.cast(y != -1.0, y_pred.dtype)
    return tf.reduce_sum(known * (y - y_pred) ** 2) / tf.reduce_sum(known)


@keras.saving.register_keras_serializable("tests")
class WeightedByHand(keras.losses.Loss):
    def __call__(self, y, y_pred, sample_weight=None):
        errors = tf.reduce_mean((y - y_pred) ** 2, -1)
        weights = tf.ones_like(errors) if sample_weight is None else sample_weight
        return tf.reduce_sum(weights * errors) / tf.reduce_sum(weights)


class OverWeights(keras.losses.Loss):
    """Of a class that Keras cannot serialize."""

    def __init__(self):
        super().__init__(reduction="mean_with_sample_weight")

    def call(self, y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2, -1)


class Tracks(keras.Sequential):
    """As in the docstring of `keras.Model.compute_loss`."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tracked = keras.metrics.Mean(name="tracked")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = tf.reduce_mean((y_pred - y) ** 2) + tf.add_n(self.losses)
        self.tracked.update_state(loss)
        return loss

    @property
    def metrics(self):
        return [self.tracked]


def of_a_variable():
    model, variable = network(), tf.Variable(2.0, dtype=tf.float64)
    return model, {"loss": lambda y, y_pred: variable * (y - y_pred) ** 2}


def several_variables(of_rows):
    """A frozen network, a weight that each step assigns, a decay by hand."""

    def make():
        model, annealed = network(), keras.Variable(2.0)
        frozen = keras.Sequential([keras.Input((2,)), L.Dense(3), L.BatchNormalization()])
        frozen.trainable, kernel = False, model.layers[0].kernel

        def loss(y, y_pred):
            annealed.assign(annealed * 0.9)
            perceived = tf.reduce_mean((frozen(y) - frozen(y_pred)) ** 2, -1)
            return of_rows(y, y_pred) + annealed * perceived + 0.1 * tf.reduce_sum(kernel**2)

        return model, {"loss": loss}

    return make


def of_one_output():
    x = keras.Input((4,))
    keras.utils.set_random_seed(1)
    outputs = {"a": L.Dense(2, "sigmoid", name="a")(x), "b": L.Dense(2, name="b")(x)}
    return keras.Model(x, outputs), {
        "loss": {"a": "dice", "b": masked},
        "metrics": {"b": [masked, "mse"]},
    }


def of_weighted_outputs():
    model, options = of_one_output()
    weights = {"a": keras.Variable(0.3), "b": 2.0}
    return model, options | {"loss": {"a": "mse", "b": "mae"}, "loss_weights": weights}


def contrast(y, embeddings):
    """InfoNCE over the batch: rows of the same label are to be alike."""
    rows = tf.math.l2_normalize(towers.gather(embeddings), axis=1)
    labels, itself = towers.gather(y[:, 0] > 0), tf.eye(tf.shape(rows)[0], dtype=rows.dtype)
    similar = tf.matmul(rows, rows, transpose_b=True) / 0.3 - 9.0 * itself
    same = tf.cast(labels[:, tf.newaxis] == labels[tf.newaxis], rows.dtype) - itself
    return -tf.reduce_sum(same * tf.nn.log_softmax(similar, axis=1)) / (tf.reduce_sum(same) + 1.0)


class Contrasts(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return contrast(y, y_pred) + 0.1 * tf.reduce_mean(y_pred**2)


class OfEachRow(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean((y - y_pred) ** 2, -1)


@keras.saving.register_keras_serializable("tests")
class Centered(L.Layer):
    """Each row less the mean over the whole batch."""

    def call(self, x):
        return x - tf.reduce_mean(towers.gather(x), axis=0)


def centered():
    """Towers meet in the model and in its loss."""
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), L.Dense(6, "tanh"), Centered(), L.Dense(2)]
    return Contrasts(layers), {"loss": None, "metrics": ["mae"], "predicts": True}


CASES = {
    "mean over a mask": lambda: (network(), {"loss": masked, "metrics": [masked, "mse"]}),
    "weighted by hand": lambda: (network(), {"loss": WeightedByHand(), "weights": WEIGHTS}),
    "mean over weights": lambda: (network(), {"loss": OverWeights(), "weights": WEIGHTS}),
    "sum": lambda: (
        network(kernel_regularizer="l2"),
        {"loss": lambda y, y_pred: tf.nn.l2_loss(y - y_pred)},
    ),
    "chosen values": lambda: (
        network(),
        {"loss": lambda y, y_pred: tf.gather_nd((y - y_pred) ** 2, tf.where(y > 0))},
    ),
    "compute_loss of each row": lambda: (network(OfEachRow), {"loss": None}),
    "several outputs": of_one_output,
    "weight of a loss": of_weighted_outputs,
    "tf.Variable": of_a_variable,
    "variables": several_variables(lambda y, y_pred: tf.reduce_mean((y - y_pred) ** 2, -1)),
    "variables and a mask": several_variables(masked),
    "tracked loss": lambda: (network(Tracks, kernel_regularizer="l2"), {"loss": None}),
    "gather in a loss": lambda: (network(), {"loss": contrast}),
    "gather in a layer and in compute_loss": centered,
    "tracked activity": lambda: (
        network(Tracks, kernel_regularizer="l2", activity_regularizer="l2"),
        {"loss": None},
    ),
}


def run(make, num_towers):
    """Logs of two epochs and an evaluation, the weights, and predictions."""
    model, options = make()
    weights, predicts = options.pop("weights", None), options.pop("predicts", False)
    y = (
        {name: np.abs(MISSING) for name in model.output_names}
        if (isinstance(options["loss"], dict))
        else MISSING
    )
    if num_towers:
        model = towers.make_parallel(model, min(2, num_towers), num_towers=num_towers)
    # Keras' own model runs eagerly, which is faster; with several losses their means would differ.
    is_eager = not (num_towers or isinstance(options["loss"], dict))
    model.compile(keras.optimizers.SGD(0.1), jit_compile=False, run_eagerly=is_eager, **options)
    history = model.fit(
        X, y, batch_size=14, epochs=2, shuffle=False, sample_weight=weights, verbose=0
    ).history
    values = model.evaluate(X, y, batch_size=len(X), sample_weight=weights, verbose=0)
    predictions = model.predict(X, batch_size=7, verbose=0) if predicts else 0.0
    return history | {
        "evaluation": values,
        "predictions": predictions,
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
    }


@pytest.mark.telling(
    "3-several outputs",
    "3-variables and a mask",
    "3-gather in a layer and in compute_loss",
)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
@pytest.mark.parametrize("num_towers", [1, 3, 8])  # of 3 towers, one has no rows of 2
def test_a_compiled_loss_is_the_loss_of_the_full_batch(make, num_towers, float64):
    expected = run(make, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_logs(run(make, num_towers), expected)
