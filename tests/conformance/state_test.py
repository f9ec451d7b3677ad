"""The state of layers after steps on three towers equals Keras' state after the whole batches.

This holds for built-in and custom steps, and for synchronized BatchNormalization.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.bits import bits
from tests.conformance.steps import step_of
from tests.parallel.pairs import Own, assert_close, assert_same_logs

L = keras.layers
BATCHES = [7, 5, 2]  # the last one leaves a tower without rows


class Keeps(L.Layer):
    """Assigns `function(old, rows)` to its state in each call."""

    def __init__(self, function, name="keeps", **options):
        super().__init__(name=name)
        self.function, self.options = function, {"initializer": "zeros", **options}

    def build(self, shape):
        self.kept = self.add_weight(shape=(), trainable=False, name="kept", **self.options)

    def call(self, x):
        self.kept.assign(self.function(self.kept, x))
        return x


def batches():
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 4)), rng.normal(size=(n, 2))) for n in BATCHES]


def trained(make_layers, num_towers, num_devices=1, is_custom=False):
    """The variables, by path, after three steps on towers; with 0 towers by Keras itself."""
    keras.utils.set_random_seed(3)
    model = model_of(*make_layers())
    if is_custom:
        step = step_of(lambda model, x, y: model.compute_loss(y=y, y_pred=model(x, training=True)))
        model = type("Custom", (keras.Sequential,), {"train_step": step})(model.layers)
        model = towers.make_parallel(model, num_devices, num_towers=num_towers)
    if num_towers and not is_custom:
        step = towers.TowerStep(
            model,
            keras.optimizers.SGD(0.1),
            "mse",
            num_towers=num_towers,
            devices=towers.tower_devices(num_devices, "cpu"),
        )
    else:
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=not num_towers)
        step = model.train_on_batch
    for batch in batches():
        step(*batch)
    return {v.path.split("/", 1)[1]: v.numpy() for v in model.variables}


def model_of(*layers):
    first, last = L.Dense(4, name="first"), L.Dense(2, name="last")
    return keras.Sequential([keras.Input((4,)), first, *layers, last])


STATES = {  # (the old value, rows) -> the new one
    "steps": (lambda old, x: old + 1, {}),
    "steps_int64": (lambda old, x: old + 1, {"dtype": "int64"}),
    "rows": (lambda old, x: old + tf.cast(tf.shape(x)[0], old.dtype), {}),
    "rows_int32": (lambda old, x: old + tf.shape(x)[0], {"dtype": "int32"}),
    "sums": (lambda old, x: old + tf.reduce_sum(x), {}),
    "aggregated_sum": (lambda old, x: old + tf.reduce_sum(x), {"aggregation": "sum"}),
    "moving_mean": (lambda old, x: 0.9 * old + 0.1 * tf.reduce_mean(x), {}),
    "mean": (lambda old, x: tf.reduce_mean(x), {}),
    "aggregated_mean": (lambda old, x: tf.reduce_mean(x), {"aggregation": "mean"}),
    "sum_and_mean": (lambda old, x: old + tf.reduce_sum(x) + tf.reduce_mean(x), {}),
    "maximum": (lambda old, x: tf.maximum(old, tf.reduce_max(x)), {}),
    "root": (lambda old, x: tf.sqrt(tf.reduce_mean(x**2)), {}),
    "index": (lambda old, x: tf.argmax(x[0]), {"dtype": "int64"}),
    "first_replica": (lambda old, x: tf.reduce_max(x), {"aggregation": "only_first_replica"}),
}


class CountsInBatchNormalization(L.BatchNormalization):
    """An integer counter in a subclass, whose statistics stay as they are."""

    def build(self, shape):
        super().build(shape)
        self.count = self.add_weight(
            shape=(), dtype="int64", initializer="zeros", trainable=False, name="count"
        )

    def call(self, x, training=None):
        self.count.assign(self.count + 1)
        return super().call(x, training=False)


def stateful_layers():
    return [
        *(Keeps(function, name, **options) for name, (function, options) in STATES.items()),
        CountsInBatchNormalization(name="counts"),
        L.SpectralNormalization(L.Dense(4, name="dense"), name="spectral"),
    ]


def test_state_is_what_keras_makes_of_the_whole_batch(float64):
    expected = trained(stateful_layers, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = [
            trained(stateful_layers, 3, num_devices=2),
            trained(stateful_layers, 3, is_custom=True),
        ]
    for variables in found:
        assert list(variables) == list(expected)
        for name, value in variables.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10, atol=1e-14, err_msg=name)


def test_state_that_inference_assigns_is_kept_as_by_keras(float64):
    kept = []
    for num_towers in (0, 3):
        keras.utils.set_random_seed(0)
        model = model_of(Keeps(STATES["rows"][0]))
        if num_towers:
            model = towers.make_parallel(model, 2, num_towers=num_towers)
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=not num_towers)
        for x, y in batches():
            model.test_on_batch(x, y)
            model.predict_on_batch(x)
        kept.append(float(model.layers[1].kept))
    assert kept[1] == kept[0] == 2 * sum(BATCHES)


def test_float8_layers_keep_the_largest_values_of_the_whole_batch():
    """Their scales take the place of gradients, which must not be added up."""

    def scales(num_towers):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), L.Dense(8, dtype="float8_from_float32")])
        if num_towers:
            model = towers.make_parallel(model, 2, num_towers=num_towers)
        model.compile("sgd", "mse", jit_compile=False)
        x = np.random.default_rng(0).normal(size=(22, 8)).astype("float32")
        model.fit(x, x, batch_size=8, shuffle=False, verbose=0)
        return [v.numpy() for v in model.variables if "scale" in v.path or "amax" in v.path]

    for ours, theirs in zip(scales(3), scales(0), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


# Synchronized BatchNormalization


def fitted(num_towers=None, num_devices=1, kind=keras.Sequential, **batch_norm):
    keras.utils.set_random_seed(5)
    norm = L.BatchNormalization(synchronized=not batch_norm)
    layers = [keras.Input((6, 6, 1)), L.Conv2D(3, 3), norm, L.ReLU(), L.Flatten(), L.Dense(3)]
    model = kind(layers)
    if num_towers:
        model = towers.make_parallel(model, num_devices, num_towers=num_towers, **batch_norm)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False, run_eagerly=not num_towers)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 6, 6, 1)), rng.integers(0, 3, 22)
    history = model.fit(
        x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, validation_data=(x[:9], y[:9])
    ).history
    return model, history


@pytest.mark.telling("3-all")
@pytest.mark.parametrize(
    "options", [{}, {"batch_norm": "synchronized"}, {"kind": Own}], ids=["layer", "all", "own"]
)
@pytest.mark.parametrize("num_towers", [3, 8])
def test_synchronized_statistics_are_those_of_the_full_batch(num_towers, options, float64):
    theirs, expected = fitted()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours, history = fitted(num_towers, 2, **options)
    assert_same_logs(history, expected)
    assert_close(ours.variables, theirs.variables, atol=1e-10)


@pytest.mark.matrix
def test_synchronized_statistics_have_the_same_bits_on_any_number_of_devices():
    first, *others = [fitted(8, n, batch_norm="synchronized")[0] for n in (1, 2, 8)]
    for other in others:
        for a, b in zip(first.variables, other.variables, strict=True):
            assert bits(a) == bits(b), a.path
