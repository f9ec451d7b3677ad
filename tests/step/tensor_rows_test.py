"""Rows of sparse tensors are chosen as those of dense ones; see `step/sharding_test.py` too."""

import numpy as np
import pytest
import tensorflow as tf

from towers.step.structures import batch_specs
from towers.step.tensor_rows import as_tensor, gather_rows, join_rows, take_rows


@pytest.mark.parametrize("index", [[3, 0, 2, 3], []])
def test_rows_are_gathered_in_any_order(index):
    dense = np.arange(24).reshape(6, 2, 2) % 5 * (np.arange(6) != 2)[:, None, None]
    rows = gather_rows(tf.sparse.from_dense(dense), tf.constant(index, tf.int64))
    np.testing.assert_array_equal(tf.sparse.to_dense(rows), dense[index])


def test_the_parts_of_a_traced_tensor_keep_its_shape_but_for_the_rows():
    @tf.function(input_signature=[tf.SparseTensorSpec([None, 4, 2], tf.float32)])
    def parts(tensor):
        for part in (take_rows(tensor, [1], [3]), join_rows([tensor, tensor])):
            assert part.shape.as_list()[1:] == [4, 2]
        return tf.sparse.to_dense(part)

    dense = np.arange(24.0, dtype="float32").reshape(3, 4, 2)
    np.testing.assert_array_equal(parts(tf.sparse.from_dense(dense)), np.concatenate([dense] * 2))


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
