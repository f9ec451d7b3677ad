"""Running means over global batches, as Keras gives them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.step.metrics import BatchMetrics


def batch(size, seed=0):
    """x, labels, probabilities."""
    rng = np.random.default_rng(seed)
    x, scores = rng.normal(size=(size, 3)), rng.uniform(0.01, 0.99, (size, 1))
    labels = rng.integers(0, 2, (size, 1)).astype("float32")
    return tf.constant(x), tf.constant(labels), tf.constant(scores, tf.float32)


def numbers(logs):
    return {name: float(value) for name, value in logs.items()}


def test_metrics_that_no_shard_could_give_are_those_of_keras_over_all_batches():
    metrics = BatchMetrics(["accuracy", keras.metrics.AUC(name="auc")], None, "/cpu:0")
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


def test_the_loss_is_the_mean_over_examples_not_over_batches():
    metrics = BatchMetrics((), None, "/cpu:0")
    for loss, size in ((2.0, 8), (6.0, 2), (1.0, 6)):
        logs = metrics.update(tf.constant(loss), *batch(size))
    assert numbers(logs) == {"loss": (2 * 8 + 6 * 2 + 1 * 6) / 16}


def test_a_reset_forgets_all_batches():
    metrics = BatchMetrics(["mae"], None, "/cpu:0")
    metrics.update(tf.constant(9.0), *batch(4))
    metrics.reset()
    x, y, y_pred = batch(2)
    logs = metrics.update(tf.constant(3.0), x, y, y_pred)
    assert numbers(logs) == {
        "loss": 3.0, "mae": pytest.approx(np.abs(y - y_pred).mean(), rel=1e-6)
    }


def test_building_makes_the_variables_and_leaves_them_at_their_beginning():
    metrics = BatchMetrics(["mae", "mse"], None, "/cpu:1")
    specs = tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1])
    metrics.build(*specs)
    made = metrics.variables
    assert len(made) == 6  # a sum and a count each, the loss' among them
    assert all(not variable.numpy().any() for variable in made)
    assert {variable.value.device[-5:] for variable in made} == {"CPU:1"}
    metrics.update(tf.constant(2.0), *batch(4))
    metrics.build(*specs)  # once is enough: nothing is forgotten
    assert float(metrics.result()["loss"]) == 2
    assert all(a is b for a, b in zip(metrics.variables, made, strict=True))


def test_a_graph_with_metrics_that_are_built_is_traced_once():
    metrics, traces = BatchMetrics(["mae"], None, "/cpu:0"), []
    metrics.build(tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1]))

    @tf.function(autograph=False)
    def update(x, y, y_pred):
        traces.append(1)
        return metrics.update(tf.constant(1.0), x, y, y_pred)

    update(*batch(4))
    assert len(traces) == 1


def test_steps_that_a_mask_leaves_out_do_not_count():
    y_pred = keras.layers.Masking()(np.array([[[1.0], [3.0], [0.0]]], "float32"))
    metrics = BatchMetrics([keras.metrics.MeanAbsoluteError(name="mae")], None, "/cpu:0")
    logs = metrics.update(tf.constant(0.0), tf.zeros([1, 3]), tf.zeros([1, 3, 1]), y_pred)
    assert float(logs["mae"]) == 2  # of 1 and 3; of three it would be 4/3


def test_each_output_has_its_metrics_by_its_name():
    metrics = BatchMetrics({"one": ["mae"], "two": ["mse"]}, ["one", "two"], "/cpu:0")
    y = {"one": tf.zeros([2, 1]), "two": tf.zeros([2, 1])}
    y_pred = {"one": tf.constant([[1.0], [3.0]]), "two": tf.constant([[1.0], [3.0]])}
    logs = metrics.update(tf.constant(0.0), tf.zeros([2]), y, y_pred)
    assert numbers(logs) == {"loss": 0.0, "one_mae": 2.0, "two_mse": 5.0}
