"""One tree of additions, the same whichever device holds which tower."""

import numpy as np
import pytest
import tensorflow as tf

from towers.machine import devices
from towers.step import averaging


def tower_sum(values, num_devices, add_on_devices=True):
    names = devices.tower_devices(num_devices, "cpu")
    placed = devices.place_towers(len(values), names)
    tree = averaging.partial_sums([[v] for v in values], placed, add_on_devices=add_on_devices)
    return averaging.add_tree(tree)[0]


def by_hand(values):
    """The balanced tree, in NumPy: the first half, rounded up, plus the second."""
    if len(values) == 1:
        return values[0]
    middle = (len(values) + 1) // 2
    return by_hand(values[:middle]) + by_hand(values[middle:])


@pytest.mark.parametrize("num_towers", [1, 2, 3, 5, 6, 8, 13])
def test_the_sum_has_the_bits_of_the_balanced_tree_on_any_number_of_devices(num_towers):
    rng = np.random.default_rng(num_towers)
    values = [rng.normal(size=100).astype("float32") * 10.0 ** rng.integers(-3, 4)
              for _ in range(num_towers)]
    expected = by_hand(values)
    tensors = [tf.constant(v) for v in values]
    for num_devices in (1, 2, 3, 4, 8):
        np.testing.assert_array_equal(tower_sum(tensors, num_devices), expected)
        np.testing.assert_array_equal(tower_sum(tensors, num_devices, False), expected)


def test_sparse_gradients_are_joined_in_tower_order():
    def slices(value, index):
        return tf.IndexedSlices(tf.constant([[value]]), tf.constant([index]), tf.constant([4, 1]))

    total = tower_sum([slices(1.0, 2), slices(2.0, 0), slices(4.0, 2)], 2)
    assert total.values.numpy().tolist() == [[1.0], [2.0], [4.0]]
    assert total.indices.numpy().tolist() == [2, 0, 2]
    np.testing.assert_array_equal(tf.convert_to_tensor(total), [[2.0], [0.0], [5.0], [0.0]])
