"""Whether towers' values of a tensor make the global batch's."""

import warnings

import pytest
import tensorflow as tf

from towers.graph.rows import Rows


@pytest.fixture(name="x")
def _x():
    with tf.Graph().as_default():
        yield tf.compat.v1.placeholder(tf.float32, [None, 3])


def test_what_a_tower_shares_is_a_mean(x):
    weight = tf.compat.v1.placeholder(tf.float32, [3])
    rows = Rows.of_shard([x], is_shared=lambda tensor: tensor is weight)
    assert rows.kind(tf.sqrt(tf.reduce_sum(weight**2)) + tf.reduce_mean(x)).name == "mean"
    assert rows.kind(tf.reduce_sum(weight) + tf.reduce_sum(x)).name == "other"


def test_a_mean_over_ragged_rows_is_none(x):
    ragged = tf.RaggedTensor.from_row_lengths(
        x[:, 0], tf.compat.v1.placeholder(tf.int64, [None]), validate=False)
    rows = Rows.of_shard([ragged])
    assert rows.kind(tf.reduce_sum(ragged.flat_values)).name == "sum"
    assert rows.kind(tf.reduce_mean(ragged.flat_values)).name == "other"


def test_the_rows_of_ragged_and_sparse_tensors_are_counted_and_added_up(x):
    placeholder = tf.compat.v1.placeholder
    splits, values = placeholder(tf.int64, [None]), placeholder(tf.float64, [None])
    ragged = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    sparse = tf.SparseTensor(
        placeholder(tf.int64, [None, 2]), placeholder(tf.float64, [None]),
        placeholder(tf.int64, [2]))
    rows = Rows.of_shard([ragged, sparse])
    for tensor in (ragged, sparse):
        assert rows.kind(tf.cast(tf.shape(tensor)[0], tf.float64)).name == "sum"
    assert rows.kind(tf.reduce_mean(tf.reduce_sum(ragged, axis=1))).name == "mean"
    assert rows.kind(tf.reduce_mean(tf.sparse.reduce_sum(sparse, axis=1))).name == "mean"
    assert rows.kind(tf.sparse.reduce_sum(sparse)).name == "sum"
    dense = tf.sparse.to_dense(sparse)
    dense.set_shape([None, 3])
    assert rows.kind(tf.reduce_mean(dense)).name == "mean"
    assert rows.kind(tf.reduce_mean(sparse.values)).name == "other"


def test_each_line_is_warned_of_once(x):
    rows = Rows.of_shard([x])
    root = tf.sqrt(tf.reduce_mean(x))
    for value in (root, 2.0 * root, root - 1.0):
        assert rows.check(value, "the loss").name == "other"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows.warn()
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("rows_test.py:") and "takes Sqrt" in message
    assert "the loss is not the whole batch's" in message and "towers.gather" in message


def test_a_function_that_is_being_traced_knows_what_it_captures():
    kinds = []

    def outer(x):
        rows, mean = Rows.of_shard([x]), tf.reduce_mean(x)

        def body(i, best):
            kinds.append(rows.kind(tf.reduce_mean(best * x)).name)
            kinds.append(rows.kind(tf.sqrt(mean)).name)
            return i + 1, best + x

        return tf.while_loop(lambda i, best: i < 2, body, [0, x])

    tf.function(outer, autograph=False).get_concrete_function(tf.TensorSpec([None, 3]))
    assert kinds[:2] == ["mean", "other"]


def test_a_graph_of_thousands_of_operations_is_no_recursion(x):
    value = x
    for _ in range(3000):
        value = value + 1.0
    assert Rows.of_shard([x]).kind(tf.reduce_mean(value)).name == "mean"
