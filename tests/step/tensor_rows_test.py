"""Rows of sparse tensors are chosen as those of dense ones; see `step/sharding_test.py` too."""

import numpy as np
import tensorflow as tf

from towers.step.structures import batch_specs
from towers.step.tensor_rows import as_tensor


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
