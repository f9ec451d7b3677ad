"""A batch size that is written into the code."""

import keras
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import fit_alike, model_with, pairs


def test_what_is_broadcast_over_the_rows_is_not(float64):
    def step(model, data):
        x, y = data
        widths, one = tf.constant([1.0, 2.0, 3.0, 4.0], x.dtype), tf.ones([1, 4], x.dtype)
        similar = tf.matmul(x, tf.ones([3, 4], x.dtype), transpose_b=True)
        rows = x * widths + one - tf.reduce_sum(similar, axis=1, keepdims=True)
        turned = tf.transpose(rows) * tf.ones([4, 1], x.dtype)
        return {"loss": tf.reduce_mean(rows) + tf.reduce_mean(turned) + tf.reduce_mean(y)}

    fit_alike(lambda: model_with(step))


@pytest.mark.parametrize("layer, loss, said", [
    (lambda x: tf.reshape(x, [11, 4]), "mse", "11 (rows|others)"),
    (lambda x: x * tf.ones([11, 1]), "mse", "pairs the rows of a shard with 11 others"),
    (tf.identity, lambda y, y_pred: tf.ones([11, 2]) * (y - y_pred) ** 2, "with 11 others"),
], ids=["reshape", "layer", "loss"])
def test_a_plain_step_refuses_a_batch_size_in_the_code_by_its_line(layer, loss, said):
    model = towers.make_parallel(keras.Sequential(
        [keras.Input((4,)), keras.layers.Lambda(layer), keras.layers.Dense(2)]
    ), 2)
    model.compile("sgd", loss, jit_compile=False)
    message = rf"checks_fixed_batch_test.py:\d+ .*{said}.*tf.shape\(x\)"
    with pytest.raises(ValueError, match=message):
        model.fit(*pairs(), batch_size=11, verbose=0)
