"""Sums over the rows of a batch, found in the graph."""

import warnings

import pytest
import tensorflow as tf

from towers.own_step.sums import is_row_sum, warn_of_sums


@pytest.fixture(name="rows")
def _rows():
    with tf.Graph().as_default():
        yield tf.compat.v1.placeholder(tf.float32, [None, 3])


@pytest.mark.parametrize("make, expected", [
    (tf.reduce_sum, True),
    (lambda rows: tf.reduce_sum(rows, axis=0), True),
    (lambda rows: tf.reduce_sum(rows, axis=1), False),
    (tf.reduce_mean, False),
    (lambda rows: tf.reduce_sum(tf.ones([3])), False),
])
def test_a_sum_over_the_batch_axis_is_known(rows, make, expected):
    assert is_row_sum(make(rows)) is expected


@pytest.mark.parametrize("make", [
    lambda rows: tf.reduce_sum(rows) / 32.0,
    lambda rows: tf.nn.compute_average_loss(rows[:, 0], global_batch_size=32),
    lambda rows: 0.5 * tf.reduce_sum(rows**2) + tf.reduce_mean(rows),
    lambda rows: tf.reduce_mean(rows) - tf.reduce_sum(rows),
])
def test_a_scalar_that_holds_a_sum_is_warned_of(rows, make):
    with pytest.warns(UserWarning, match=r"sums_test.py:\d+ .* sum over the rows.*reduce_mean"):
        warn_of_sums(make(rows))


@pytest.mark.parametrize("make", [
    tf.reduce_mean,
    lambda rows: tf.reduce_sum(rows) / tf.cast(tf.shape(rows)[0], tf.float32),
    lambda rows: tf.reduce_mean(tf.reduce_sum(rows, axis=1)) * 2.0 + tf.reduce_sum(tf.ones([3])),
    lambda rows: tf.sqrt(tf.reduce_sum(rows)),
])
def test_what_may_be_a_mean_is_not(rows, make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_sums(make(rows))
