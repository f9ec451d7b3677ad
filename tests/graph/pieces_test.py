"""Sizes, parts of tensors, and tensors of parts."""

import pytest
import tensorflow as tf

from tests.graph.kinds import kind_of


def rows(x):
    return tf.range(tf.shape(x)[0])


MEANS = [
    lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), x.dtype),
    lambda x: tf.reduce_sum(x) / tf.cast(tf.reduce_prod(tf.shape(x)), x.dtype),
    lambda x: tf.nn.compute_average_loss(x[:, 0], global_batch_size=tf.shape(x)[0]),
    lambda x: tf.reduce_mean(x[:, 1:]),
    lambda x: tf.reduce_mean(x[..., 0]),
    lambda x: tf.reduce_mean(tf.split(tf.concat([x, 2 * x], axis=0), 2)[0]),
    lambda x: tf.reduce_mean(tf.concat([x, 2 * x], axis=0)[:tf.shape(x)[0]]),
    lambda x: tf.reduce_mean(x[:tf.shape(x)[0]]),
    lambda x: tf.reduce_mean(tf.stack([x, x], axis=0)[1]),
    lambda x: tf.reduce_mean(tf.stack(tf.unstack(x, axis=1), axis=1)),
    lambda x: tf.reduce_mean(tf.gather_nd(x, tf.stack([rows(x), 0 * rows(x)], axis=1))),
    lambda x: tf.reduce_mean(tf.gather(tf.ones([9, 2]), tf.cast(x[:, 0], tf.int32))),
    lambda x: tf.reduce_mean(tf.gather(x, [0, 2], axis=1)),
    lambda x: tf.reduce_mean(tf.gather(x, rows(x))),
]
FAULTS = {
    "by their place": lambda x: tf.reduce_mean(x[:2]),
    "some rows": lambda x: tf.reduce_mean(x[0]),
    "takes some": lambda x: tf.reduce_mean(x[1:] - x[:-1]),
    "rows of the batch by": lambda x: tf.reduce_mean(x[::-1] * x),
    "of the batch by": lambda x: tf.reduce_mean(tf.split(x, 2)[0]),
    "(tf.gather)": lambda x: tf.reduce_mean(tf.gather(x, [0, 1])),
    "into another order": lambda x: tf.reduce_mean(tf.gather(x, tf.random.shuffle(rows(x))) * x),
    "joins": lambda x: tf.reduce_mean(tf.concat([x, tf.zeros([5, 3])], axis=0)),
    "values choose": lambda x: tf.reduce_mean(tf.dynamic_partition(
        x, tf.cast(x[:, 0] > 0, tf.int32), 2)[1]),
}


@pytest.mark.parametrize("make", MEANS)
def test_parts_of_rows_are_the_rows_own(make):
    assert kind_of(make).name == "mean"


@pytest.mark.parametrize("what", FAULTS)
def test_rows_that_are_chosen_or_moved_are_a_fault(what):
    kind = kind_of(FAULTS[what])
    assert kind.name == "other" and what in kind.fault.what
