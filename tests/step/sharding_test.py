"""Shards are the batch, in order, in parts that differ by at most one example."""

import numpy as np
import pytest
import tensorflow as tf

from towers.step import sharding
from towers.step.structures import as_tensor, batch_specs, join_rows


@pytest.mark.parametrize("num_towers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_examples", [1, 2, 4, 5, 7, 8, 9, 40])
def test_real_rows_joined_are_the_batch_and_empty_shards_carry_a_row(num_examples, num_towers):
    batch = tf.range(num_examples)
    shards = sharding.shard_batch(batch, num_towers)
    sizes = [int(shard.size) for shard in shards]
    rows = np.concatenate([s.values.numpy()[:n] for s, n in zip(shards, sizes, strict=True)])
    assert rows.tolist() == list(range(num_examples))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sharding.shard_sizes(num_examples, num_towers)
    assert [s.values.shape[0] for s in shards] == [max(size, 1) for size in sizes]


def test_every_tensor_of_a_structure_is_split_and_none_stays_none():
    batch = ({"a": tf.range(5), "b": tf.range(10, 15)}, tf.range(20, 25), None)
    second = sharding.shard_batch(batch, 2)[1].values
    assert second[0]["a"].numpy().tolist() == [3, 4]
    assert second[0]["b"].numpy().tolist() == [13, 14]
    assert second[1].numpy().tolist() == [23, 24]
    assert second[2] is None


def test_the_rows_of_a_sparse_tensor_are_split_and_joined_as_dense_rows_are():
    dense = np.arange(24).reshape(6, 2, 2) % 5 * (np.arange(6) != 2)[:, None, None]
    batch = tf.sparse.from_dense(dense)
    for num_towers in (1, 4, 8):
        shards = sharding.shard_batch(batch, num_towers)
        for ours, theirs in zip(shards, sharding.shard_batch(dense, num_towers), strict=True):
            np.testing.assert_array_equal(tf.sparse.to_dense(ours.values), theirs.values)
            assert ours.values.shape == theirs.values.shape
        joined = join_rows([sharding.rows_of(shard.values, shard) for shard in shards])
        pairs = zip(tf.nest.flatten(joined, True), tf.nest.flatten(batch, True), strict=True)
        for ours, theirs in pairs:
            np.testing.assert_array_equal(ours, theirs)


class Matrix:
    """What towers take of a matrix of SciPy: entries in any order, by `tocoo()`."""

    shape, dtype = (3, 4), np.dtype("float32")
    row, col, data = np.array([2, 0, 2]), np.array([3, 1, 0]), np.array([1, 2, 3], "float32")

    def tocoo(self):
        return self


def test_a_matrix_of_scipy_becomes_a_sparse_tensor_in_the_order_of_its_rows():
    tensor = as_tensor(Matrix())
    assert tensor.indices.numpy().tolist() == [[0, 1], [2, 0], [2, 3]]
    assert tensor.values.numpy().tolist() == [2, 3, 1] and tensor.shape == [3, 4]
    assert batch_specs(Matrix()) == tf.SparseTensorSpec([None, 4], tf.float32)
