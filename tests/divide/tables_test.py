"""Every rule of tables.py by itself: whole and divided among towers."""

import functools

import pytest
import tensorflow as tf

from tests.divide.whole_and_divided import N3, Cases, assert_alike, kinds_without
from towers.divide import tables
from towers.divide.tables import TABLES

CASES = Cases()
CHANGED = Cases()  # a step that changes a table


@functools.cache
def table(is_mutable=False):
    """Maps 0, 1, 2 to numbers, and others to -1."""
    with tf.init_scope():
        keys, numbers = tf.constant([0, 1, 2], tf.int64), tf.constant([0.5, 1.5, 2.5])
        if not is_mutable:
            given = tf.lookup.KeyValueTensorInitializer(keys, numbers)
            return tf.lookup.StaticHashTable(given, -1.0)
        made = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)
        made.insert(keys, numbers)
        return made


def found(x, is_mutable=False):
    return table(is_mutable).lookup(tf.cast(x, tf.int64))


def found_after_a_change(x):
    table(is_mutable=True).insert(tf.constant([1], tf.int64), [7.0])
    return found(x, is_mutable=True)


def counts(x, weights=None, num_kinds=4):
    """Counts in each row; TensorFlow does not tell the number of kinds that Keras' layers tell."""
    numbers = tf.cast(tf.abs(x), tf.int32)
    made = tf.math.bincount(numbers, weights, 4, 4, axis=-1)
    made.set_shape([*x.shape[:-1], num_kinds])
    return made


CASES.add("LookupTableFindV2", found, N3)
CASES.add("LookupTableFindV2", lambda x: found(x, is_mutable=True), N3)
CASES.add("LookupTableFindV2", lambda x: tf.exp(found(x)) @ tf.ones([3, 2]), N3)
CASES.add("LookupTableFindV2", lambda x: found(tf.reduce_sum(x, 0)), N3, divided=False)
CHANGED.add("LookupTableFindV2", found_after_a_change, N3, divided=False)
CASES.add("DenseBincount", counts, N3, extremes=())
CASES.add("DenseBincount", counts, N3, N3, extremes=())
CASES.add("DenseBincount", lambda x: counts(x, num_kinds=None), N3, divided=False, extremes=())
CASES.add("DenseBincount", lambda x: counts(x[:, 0]), N3, divided=False, extremes=())
CASES.add("DenseBincount", lambda x: counts(tf.transpose(x)), N3, divided=False, extremes=())


@pytest.mark.parametrize(
    "cases", [*CASES.groups, CHANGED], ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_it_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_has_a_case_that_is_divided():
    assert kinds_without(TABLES, tables, CASES) == set()
