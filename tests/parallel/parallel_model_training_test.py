"""fit, evaluate, predict and their one-batch forms give what Keras gives on one device."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.divide.divided_step import DividedStep
from tests.conformance.cases import ODD
from tests.parallel.fits import Batches
from tests.parallel.pairs import (
    CLASSIFIER,
    TOLERANCE,
    assert_close,
    assert_same_fit,
    assert_same_logs,
    assert_same_weights,
    batches,
    build_pair,
    classifier,
    rows,
)

pytestmark = pytest.mark.usefixtures("float64")
CASES = {case.name: case for case in ODD}


def decayed():
    """SGD with a schedule, weight decay, clipping and averaged weights."""
    rates = keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.125, 0.0625])
    return keras.optimizers.SGD(
        rates, momentum=0.9, weight_decay=0.01, global_clipnorm=0.3, use_ema=True, ema_momentum=0.9
    )


@functools.cache
def shared_pair():
    """A pair that the tests train further: both models stay equal."""
    return build_pair(
        classifier, **{**CLASSIFIER, "optimizer": decayed, "weighted_metrics": lambda: ["accuracy"]}
    )


def test_fit_on_arrays_is_keras_fit_and_traces_one_step(monkeypatch):
    """The examples are shuffled, and the last batch of each of three epochs is uneven."""
    traced, call = [], DividedStep.__call__
    monkeypatch.setattr(
        DividedStep, "__call__", lambda *args, **kw: traced.append(1) or call(*args, **kw)
    )
    history = assert_same_fit(shared_pair(), rows, batch_size=7, epochs=3)
    assert list(history) == ["accuracy", "loss", "weighted_accuracy"]
    assert history["weighted_accuracy"] == history["accuracy"]
    assert history["loss"][2] < history["loss"][0] and len(traced) <= 1  # 0 after other tests


def dataset():
    return tf.data.Dataset.from_tensor_slices(rows()).batch(7)


def test_fit_takes_every_kind_of_data():
    for data, options in [
        (lambda: (dataset(),), {}),
        (lambda: (Batches(rows()),), {"shuffle": False}),
        (lambda: (batches(),), {"steps_per_epoch": 4}),
        (rows, {"batch_size": 7, "steps_per_epoch": 3}),
    ]:
        assert_same_fit(shared_pair(), data, **options)


def test_sample_weight_class_weight_and_weighted_metrics():
    weight = np.random.default_rng(1).uniform(0.1, 3.0, 31)
    for weights in ({"sample_weight": weight}, {"class_weight": {0: 1.0, 1: 5.0, 2: 0.2}}):
        history = assert_same_fit(shared_pair(), rows, batch_size=7, **weights)
        assert history["weighted_accuracy"] != history["accuracy"]


def test_validation_data():
    history = assert_same_fit(
        shared_pair(),
        rows,
        batch_size=7,
        epochs=2,
        validation_data=rows(10),
        validation_batch_size=4,
        validation_freq=2,
    )
    assert [name for name in history if name.startswith("val_")] == [
        "val_accuracy",
        "val_loss",
        "val_weighted_accuracy",
    ]


def test_one_batch_methods():
    pair = shared_pair()
    for count in (7, 3, 1):
        x, y = rows(count)
        weight = np.linspace(0.5, 2.0, count)
        for call in (
            lambda m: m.train_on_batch(x, y, sample_weight=weight, return_dict=True),
            lambda m: m.train_on_batch(x, y, class_weight={0: 1, 1: 2, 2: 3}, return_dict=True),
            lambda m: m.test_on_batch(x, y, sample_weight=weight, return_dict=True),
            lambda m: {"outputs": m.predict_on_batch(x)},
        ):
            assert_same_logs(call(pair.ours), call(pair.theirs))
    assert_same_weights(pair)


def test_evaluate_and_predict_keep_the_order_of_the_examples():
    pair = shared_pair()
    x, y = rows()
    theirs, ours = (m.evaluate(x, y, batch_size=7, verbose=0, return_dict=True) for m in pair)
    assert_same_logs(ours, theirs)
    for data in (x, tf.data.Dataset.from_tensor_slices(x).batch(4)):
        theirs, ours = (m.predict(data, verbose=0) for m in pair)
        assert ours.shape == (31, 3)
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE)


class OutputsWithoutRows(keras.Model):
    """6 numbers -> 3 classes, and outputs that are no value for each example."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5)
        self.last = keras.layers.Dense(3, activation="softmax")

    def call(self, x):
        hidden = self.hidden(x)
        return {
            "classes": self.last(hidden),
            "mean": keras.ops.mean(hidden, axis=0),
            "total": keras.ops.sum(hidden),
            "count": keras.ops.shape(hidden)[0],
            "kernel": self.hidden.kernel * 1.0,
            "number": 3.0,
            "twice": keras.ops.repeat(hidden, 2, axis=0),  # two rows for each example
        }


def test_outputs_without_a_row_for_each_example_are_those_of_the_full_batch():
    loss = {"classes": "sparse_categorical_crossentropy"}
    pair, (x, y) = build_pair(OutputsWithoutRows, optimizer=lambda: "sgd", loss=loss), rows()
    assert_same_fit(pair, lambda: (x, {"classes": y}), batch_size=7)
    theirs, ours = (model.evaluate(x, {"classes": y}, verbose=0) for model in pair)
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    theirs, ours = (model.predict(x, batch_size=7, verbose=0) for model in pair)
    assert list(ours) == list(theirs)
    assert_close(ours.values(), theirs.values())


@pytest.mark.matrix
def test_labels_of_the_outputs_with_a_loss_alone():
    case = CASES["two_outputs"]
    x, y, _ = case.batch(13, np.random.default_rng(0))
    pair = build_pair(case.build, optimizer=lambda: "sgd", loss=["mse", None])
    assert_same_fit(pair, lambda: (list(x), y[0]), batch_size=5)


def test_a_layer_is_frozen_or_unfrozen_from_the_next_compile_on():
    """The model has a seed, whose place among the variables changes with it."""

    def build():
        first, last = classifier().layers
        return keras.Sequential([keras.Input((6,)), first, keras.layers.GaussianNoise(1e-14), last])

    loss, is_changed = CLASSIFIER["loss"], []
    pair = build_pair(build, optimizer=lambda: "sgd", loss=loss)
    for is_trainable, is_compiled in [(False, False), (True, False), (True, True)]:
        pair.ours.layers[0].trainable = is_trainable
        pair.theirs.layers[0].trainable = is_compiled  # eager, it has no trace that would go on
        if is_compiled:
            pair.ours.compile("sgd", loss, jit_compile=False)
            pair.theirs.compile("sgd", loss, run_eagerly=True)
        before = pair.ours.layers[0].kernel.numpy()
        assert_same_fit(pair, rows, batch_size=7)
        is_changed.append(np.any(before != pair.ours.layers[0].kernel.numpy()))
    assert is_changed == [False, False, True]
