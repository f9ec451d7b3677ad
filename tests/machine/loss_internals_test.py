"""A test for each private part of Keras' losses and metrics that towers uses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.machine import loss_internals

L = keras.layers


def two_outputs():
    x = keras.Input((3,))
    return keras.Model(x, [L.Dense(2, name="a")(x), L.Dense(1, name="b")(x)])


def test_keras_mask():
    masked = L.Masking()(tf.constant([[[1.0], [0.0]]]))
    np.testing.assert_array_equal(loss_internals.keras_mask(masked), [[True, False]])
    assert loss_internals.keras_mask(tf.ones([1])) is None


def test_marked():
    @tf.function(autograph=False)
    def loss(y, y_pred):
        y_pred = tf.identity(y_pred)
        loss_internals.marked(y_pred, {"mask": tf.constant([True, False])})
        return keras.losses.MeanSquaredError()(y, y_pred)

    assert loss(tf.zeros([2, 1]), tf.constant([[2.0], [9.0]])).numpy() == 4.0


@pytest.mark.parametrize("activation, mark", [
    (keras.activations.sigmoid, "logits"), (keras.activations.softmax, "logits"),
    (tf.nn.sigmoid, "Sigmoid"), (tf.nn.softmax, "Softmax"), (tf.nn.relu, None),
])
def test_marks_of(activation, mark):
    @tf.function(autograph=False)
    def loss(z):
        marks = loss_internals.marks_of(activation(z))
        assert set(marks) == {mark} - {None}
        y_pred = loss_internals.marked(tf.identity(activation(z)), marks)
        return keras.losses.CategoricalCrossentropy()(tf.constant([[0.0, 1.0]]), y_pred)

    found, expected = loss(tf.constant([[50.0, 0.0]])), 50.0 if mark else 16.118
    if activation is not tf.nn.sigmoid:  # which a categorical crossentropy does not look for
        np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_function_loss():
    loss = loss_internals.function_loss(lambda y, y_pred: tf.reduce_sum(y_pred - y, axis=-1))
    assert isinstance(loss, keras.losses.Loss)
    assert loss.reduction == "sum_over_batch_size"
    assert loss(tf.zeros([2, 2]), tf.constant([[1.0, 2.0], [3.0, 8.0]])).numpy() == 7.0


def test_compile_arguments():
    model = two_outputs()
    assert loss_internals.compile_arguments(model) == (None, None, None, None)
    given = ["mse", "mae"], [2.0, 3.0], ["mae", "mse"], [["mae"], []]
    model.compile("sgd", *given)
    assert loss_internals.compile_arguments(model) == given


def test_loss_terms():
    y, p = np.ones((2, 1)), np.zeros((2, 1))
    one, other = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()
    cases = [
        # loss, loss_weights, y, y_pred, sample_weight; each term's loss, factor and sample_weight
        (one, None, y, p, None, [(one, 1, None)]),
        ([one, other], None, y, p, None, [(one, 1, None)]),  # Keras computes the first alone
        (one, 2, [y, y], [p, p], y, [(one, 2, y), (one, 2, y)]),
        ([one, None], [2.0, 1.0], [y], [p, p], None, [(one, 2, None)]),
        ({"b": other, "a": one}, {"b": 3.0, "a": 2.0}, {"a": y, "b": y}, [p, p], None,
         [(one, 2, None), (other, 3, None)]),
        ({"a": [one, other]}, None, {"a": y, "b": y}, {"a": p, "b": p}, {"a": p, "b": y},
         [(one, 1, p), (other, 1, p)]),
    ]
    for loss, loss_weights, labels, predictions, weight, expected in cases:
        losses = loss_internals.LossTerms(loss, loss_weights, ["a", "b"])
        for _ in range(2):
            terms = losses.terms(labels, predictions, weight)
            assert [(t.loss, t.factor, t.sample_weight) for t in terms] == expected
            assert all(term.y is y and term.y_pred is p for term in terms)


def test_track_output_losses_and_has_output_losses():
    model = two_outputs()
    model.compile("sgd", ["mse", "mae"])
    assert not loss_internals.has_output_losses(model)
    y = [tf.zeros([4, 2]), tf.zeros([4, 1])]
    loss_internals.track_output_losses(model, y, [tf.fill([4, 2], 3.0), y[1]], None)
    means = {name: float(value) for name, value in model.get_metrics_result().items()}
    assert means == {"loss": 0.0, "a_loss": 9.0, "b_loss": 0.0}
    assert loss_internals.has_output_losses(model)


def test_compiled_metrics():
    model = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    model.compile("sgd", "mse")
    assert loss_internals.compiled_metrics(model) is None
    model.compile("sgd", "mse", metrics=["mae"])
    metrics = loss_internals.compiled_metrics(model)
    assert not metrics.built
    metrics.build(tf.TensorSpec([None, 2]), keras.KerasTensor([None, 2]))
    assert metrics.built and len(metrics.variables) == 2


def test_metric_direction():
    metrics = keras.metrics
    made = metrics.SparseCategoricalAccuracy(), metrics.AUC(), metrics.MeanSquaredError()
    directions = [loss_internals.metric_direction(metric) for metric in (*made, metrics.Mean())]
    assert directions == ["up", "up", "down", None]


def test_loss_tracker():
    class Other(keras.Sequential):
        metrics = [keras.metrics.Mean(name="other")]

    for model in (two_outputs(), Other([keras.Input((3,)), L.Dense(2)])):
        model.compile("sgd", "mse", metrics=None)
        tracker = loss_internals.loss_tracker(model)
        assert isinstance(tracker, keras.metrics.Mean) and tracker.name == "loss"
        x, y = np.ones([4, 3]), model(np.ones([4, 3]))
        model.train_on_batch(x, tf.nest.map_structure(np.asarray, y))
        assert tracker.count.numpy() == 4
