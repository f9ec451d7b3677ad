"""Operations that work row by row, and element by element."""

import keras
import pytest
import tensorflow as tf

from tests.graph.kinds import count, kind_of, positive

MEANS = [
    lambda x: 0.5 * tf.reduce_mean(x**2) + 3.0,
    lambda x: tf.reduce_mean(x) - tf.reduce_mean(x**2) / 3.0,
    lambda x: tf.reduce_sum(tf.reduce_mean(x, axis=0) * tf.constant([1.0, 2, 3])),
    lambda x: tf.add_n([tf.reduce_mean(x), tf.reduce_sum(tf.ones([3]))]),
    lambda x: tf.reduce_sum(x) / count(x),
    lambda x: tf.reduce_sum(x / count(x)),
    lambda x: tf.reduce_sum(x) / tf.maximum(count(x), 1.0),
    lambda x: tf.reduce_sum(x) / (count(x) + 1e-7),
    lambda x: tf.reduce_sum(x) / tf.reduce_sum(tf.ones_like(x)),
    lambda x: tf.reduce_mean(tf.where(x > 0, x, 0.1 * x)),
    lambda x: tf.reduce_mean(tf.transpose(x) * [[1.0], [2.0], [3.0]]),
    lambda x: tf.reduce_mean(tf.reshape(x, [-1])),
    lambda x: tf.cast(tf.reduce_mean(x), tf.float64),
    lambda x: tf.linalg.trace(tf.matmul(x, x, transpose_a=True)) / count(x),
]
SUMS = [
    lambda x: x[:, 0],
    count,
    lambda x: tf.reduce_sum(x) / 1024.0,
    lambda x: tf.nn.compute_average_loss(x[:, 0], global_batch_size=32),
    lambda x: sum([tf.reduce_sum(x), tf.nn.l2_loss(x)]),
    lambda x: tf.reduce_mean(x) * count(x),
]
NEITHER = {
    "Sqrt": lambda x: tf.sqrt(tf.reduce_mean(x**2)),
    "Log": lambda x: tf.math.log(tf.reduce_mean(x)),
    "Exp": lambda x: tf.exp(tf.reduce_mean(x)),
    "Abs": lambda x: tf.abs(tf.reduce_mean(x)),
    "Pow": lambda x: tf.reduce_sum(x**2) ** 0.5,
    "Maximum": lambda x: tf.maximum(tf.reduce_mean(x), 0.1),
    "divides": lambda x: tf.reduce_mean(x) / tf.reduce_mean(x**2),
    "by a value": lambda x: (
        tf.reduce_sum(x[:, 0] * tf.cast(positive(x), x.dtype))
        / tf.reduce_sum(tf.cast(positive(x), x.dtype))),
    "multiplies two": lambda x: tf.reduce_mean(x) * tf.reduce_mean(x),
    "to a mean": lambda x: tf.reduce_sum(x) + tf.reduce_mean(x),
    "adds a constant to a sum": lambda x: tf.reduce_sum(x) + 3.0,
    "each row a value": lambda x: tf.reduce_mean(
        (x - tf.reduce_mean(x)) / tf.math.reduce_std(x)),
    "gives each row a value that": lambda x: tf.reduce_mean(tf.cast(
        tf.cast(x, tf.int32) == tf.reduce_sum(tf.cast(x, tf.int32)), x.dtype)),
    "gives each row": lambda x: tf.reduce_sum(tf.broadcast_to(tf.reduce_mean(x), tf.shape(x))),
    "Greater": lambda x: tf.where(tf.reduce_mean(x) > 0, 1.0, 2.0) * tf.reduce_mean(x),
    "compares": lambda x: tf.reduce_mean(x[:, None] - x[None]),
    "neither a mean nor a sum": lambda x: tf.reduce_sum(x) / tf.sqrt(count(x)),
    "number of a shard's rows": lambda x: tf.reduce_mean(
        x[:, 0] * tf.cast(tf.range(tf.shape(x)[0]), x.dtype)),
    "calls Python": lambda x: tf.ensure_shape(
        tf.py_function(tf.reduce_mean, [x], x.dtype), []),
    "calls Python (tf.py_function": lambda x: tf.reduce_mean(
        tf.ensure_shape(tf.py_function(tf.square, [x], x.dtype), [None, 3])),
    "several examples into one": lambda x: tf.reduce_max(tf.reshape(x[:, 0], [-1, 2]), axis=1),
    "adds rows": lambda x: tf.reduce_mean(tf.pad(x, [[0, 1], [0, 0]])),
    "some rows": lambda x: tf.reduce_mean(tf.reshape(x, [-1])[:10]),
    "(SegmentSum)": lambda x: tf.reduce_mean(
        tf.math.segment_sum(x, tf.range(tf.shape(x)[0]) // 2)),
    "of a shard's rows what": lambda x: tf.cond(
        tf.shape(x)[0] > 5, lambda: tf.reduce_mean(x), lambda: tf.reduce_mean(x**2)),
    "takes Maximum of a value": lambda x: tf.reduce_mean(
        tf.math.unsorted_segment_mean(x, tf.cast(x[:, 0], tf.int32), 3)),
    "by their place": lambda x: tf.reduce_mean(tf.tensor_scatter_nd_update(x, [[0]], x[:1])),
    "not cast": lambda x: tf.cast(tf.cast(tf.reduce_mean(x), tf.int32), x.dtype),
}


@pytest.mark.parametrize("make", MEANS)
def test_what_is_linear_in_means_is_a_mean(make):
    assert kind_of(make).name == "mean"


@pytest.mark.parametrize("make", SUMS)
def test_what_is_linear_in_sums_is_a_sum(make):
    assert kind_of(make).name == "sum"


@pytest.mark.parametrize("what", NEITHER)
def test_what_is_not_linear_is_neither_and_says_why(what):
    kind = kind_of(NEITHER[what])
    assert kind.name == "other"
    assert what == "not cast" or what in kind.fault.what


def test_keras_operations_are_tensorflows():
    ops = keras.ops
    assert kind_of(lambda x: ops.mean(ops.sum(ops.square(x), axis=1))).name == "mean"
    assert kind_of(lambda x: ops.divide_no_nan(
        ops.sum(x), ops.cast(ops.prod(ops.shape(x)), "float32"))).name == "mean"
    assert kind_of(lambda x: ops.sqrt(ops.mean(x))).name == "other"
