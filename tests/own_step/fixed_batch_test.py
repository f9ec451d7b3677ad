"""A batch size that is written into the code."""

import keras
import pytest
import tensorflow as tf

from tests.own_step.steps import fit_alike, model_with, refused


@pytest.mark.parametrize("labels", [
    lambda: tf.ones([11, 2]), lambda: tf.concat([tf.ones([5, 2]), tf.zeros([6, 2])], axis=0),
])
def test_labels_for_a_fixed_number_of_rows_are_refused_by_line(labels):
    def step(model, data):
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        return {"loss": loss(labels(), model(data[0]))}

    message = refused(step)
    assert "fixed_batch_test.py:" in message
    assert "with 11 others" in message and "tf.ones_like" in message


def test_classes_for_a_fixed_number_of_rows_are_refused_by_line():
    def step(model, data):
        similar = tf.matmul(data[0], data[0], transpose_b=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {"loss": loss(keras.ops.arange(11), similar)}

    message = refused(step)
    assert "fixed_batch_test.py:" in message and "with 11 others" in message


def test_what_is_broadcast_over_the_rows_is_not(float64):
    def step(model, data):
        x, y = data
        widths, one = tf.constant([1.0, 2.0, 3.0, 4.0], x.dtype), tf.ones([1, 4], x.dtype)
        similar = tf.matmul(x, tf.ones([3, 4], x.dtype), transpose_b=True)
        rows = x * widths + one - tf.reduce_sum(similar, axis=1, keepdims=True)
        turned = tf.transpose(rows) * tf.ones([4, 1], x.dtype)
        return {"loss": tf.reduce_mean(rows) + tf.reduce_mean(turned) + tf.reduce_mean(y)}

    fit_alike(lambda: model_with(step))
