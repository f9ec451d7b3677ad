"""Running means over global batches, as Keras gives them."""

import keras
import numpy as np
import tensorflow as tf

from towers.step.metrics import make_metrics


def batch(size, seed=0):
    """x, labels, probabilities."""
    rng = np.random.default_rng(seed)
    x, scores = rng.normal(size=(size, 3)), rng.uniform(0.01, 0.99, (size, 1))
    labels = rng.integers(0, 2, (size, 1)).astype("float32")
    return tf.constant(x), tf.constant(labels), tf.constant(scores, tf.float32)


def numbers(logs):
    return {name: float(value) for name, value in logs.items()}


def test_metrics_that_no_shard_could_give_are_those_of_keras_over_all_batches():
    metrics = make_metrics(["accuracy", keras.metrics.AUC(name="auc")], None, "/cpu:0")
    metrics.build(*batch(4)[1:])
    accuracy, auc = keras.metrics.BinaryAccuracy(), keras.metrics.AUC()
    for seed, size in enumerate((5, 16, 1)):
        x, y, y_pred = batch(size, seed)
        logs = metrics.update(tf.constant(0.0), x, y, y_pred)
        accuracy.update_state(y, y_pred)
        auc.update_state(y, y_pred)
        assert list(logs) == ["loss", "accuracy", "auc"]
        assert numbers(logs) == {
            "loss": 0.0, "accuracy": float(accuracy.result()), "auc": float(auc.result())
        }
    assert numbers(metrics.result()) == numbers(logs)


def test_steps_that_a_mask_leaves_out_do_not_count():
    y_pred = keras.layers.Masking()(np.array([[[1.0], [3.0], [0.0]]], "float32"))
    metrics = make_metrics([keras.metrics.MeanAbsoluteError(name="mae")], None, "/cpu:0")
    logs = metrics.update(tf.constant(0.0), tf.zeros([1, 3]), tf.zeros([1, 3, 1]), y_pred)
    assert float(logs["mae"]) == 2  # of 1 and 3; of three it would be 4/3
