"""Operations along axes, the batch axis among them."""

import keras
import pytest
import tensorflow as tf

from tests.graph.kinds import count, kind_of, positive

ops = keras.ops

MEANS = [
    tf.reduce_mean,
    lambda x: tf.reduce_mean(tf.reduce_sum(x, axis=1)),
    lambda x: tf.reduce_sum(tf.reduce_mean(x, axis=0)),
    lambda x: tf.reduce_mean(tf.reduce_max(x, axis=-1)),
    lambda x: tf.reduce_mean(tf.norm(x, axis=1)),
    lambda x: tf.reduce_mean(tf.nn.softmax(x)),
    lambda x: tf.reduce_mean(tf.cumsum(x, axis=1) + tf.reverse(x, [1])),
    lambda x: tf.reduce_mean(tf.einsum("bi,bj->bij", x, x)),
    lambda x: tf.einsum("bi,bj->ij", x, x)[0, 1] / count(x),
    lambda x: tf.reduce_mean(tf.matmul(x, tf.ones([3, 2]))),
    lambda x: tf.reduce_mean(tf.linalg.inv(tf.einsum("bi,bj->bij", x, x))),
    lambda x: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.argmax(x, axis=-1), x)),
]
SUMS = [
    tf.reduce_sum,
    tf.nn.l2_loss,
    lambda x: tf.reduce_mean(tf.reduce_sum(x, axis=0)),
    lambda x: tf.einsum("bi,bi->", x, x),
    lambda x: tf.tensordot(x, x, [[0, 1], [0, 1]]),
    lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_a=True)),
    lambda x: tf.reduce_sum(tf.boolean_mask(x, positive(x))),
    lambda x: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0], tf.int32), 5)[2],
]
NEITHER = {
    "Max over": tf.reduce_max,
    "Min over": lambda x: ops.min(x, axis=0)[0],
    "Prod over": tf.reduce_prod,
    "rows that their own values choose": lambda x: tf.reduce_mean(tf.boolean_mask(x, positive(x))),
    "(TopKV2)": lambda x: tf.reduce_mean(tf.math.top_k(x[:, 0], 1).values),
    "(Softmax)": lambda x: tf.reduce_mean(tf.nn.softmax(x, axis=0) * x),
    "(Cumsum)": lambda x: tf.reduce_mean(tf.cumsum(x, axis=0)),
    "(ReverseV2)": lambda x: tf.reduce_mean(ops.flip(x, axis=0) * x),
    "(Roll)": lambda x: tf.reduce_mean(tf.roll(x, 1, axis=0) * x),
    "(Svd)": lambda x: tf.reduce_mean(tf.linalg.svd(x, compute_uv=False)),
    "takes Cholesky": lambda x: tf.reduce_mean(
        tf.linalg.cholesky(tf.matmul(x, x, transpose_a=True) / count(x))),
    "compares": lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True)),
    "rows of the batch with each": lambda x: tf.reduce_mean(tf.einsum("bi,cj->bc", x, x)),
    "": ops.logsumexp,
}
RELATIVES = [
    lambda x: tf.reduce_mean(tf.sort(x, axis=0) * x), lambda x: ops.quantile(x, 0.5),
    ops.std, ops.var, ops.max, ops.norm, lambda x: ops.mean(ops.softmax(x, axis=0) * x),
    lambda x: tf.reduce_sum(tf.nn.moments(x, [0])[1]), lambda x: tf.reduce_mean(
        tf.math.l2_normalize(x, axis=0)), lambda x: tf.clip_by_norm(tf.reduce_mean(x, 0), 1.0)[0],
]


@pytest.mark.parametrize("make", MEANS)
def test_means_over_rows_are_found(make):
    assert kind_of(make).name == "mean"


@pytest.mark.parametrize("make", SUMS)
def test_sums_over_rows_are_found(make):
    assert kind_of(make).name == "sum"


@pytest.mark.parametrize("what", NEITHER)
def test_what_else_is_done_along_the_batch_axis_is_a_fault(what):
    kind = kind_of(NEITHER[what])
    assert kind.name == "other" and what in kind.fault.what


@pytest.mark.parametrize("make", RELATIVES)
def test_relatives_of_these_are_faults(make):
    assert kind_of(make).name == "other"
