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


def test_sums_move_to_the_device_of_the_left_child_and_the_last_one_home():
    moved = []

    def move(sums, source, target):
        moved.append((sums, source, target))
        return sums

    values, devices_of = [[1], [2], [4], [8]], ["/cpu:1", "/cpu:1", "/cpu:2", "/cpu:3"]
    options = {"home": "/cpu:0", "move": move}
    tree = averaging.partial_sums(values, devices_of, add_on_devices=True, **options)
    assert tree == [15]
    assert moved == [
        ([2], "/cpu:1", "/cpu:1"), ([8], "/cpu:3", "/cpu:2"), ([12], "/cpu:2", "/cpu:1"),
        ([15], "/cpu:1", "/cpu:0"),
    ]
    moved.clear()
    tree = averaging.partial_sums(values, devices_of, add_on_devices=False, **options)
    assert tree == (([1], [2]), ([4], [8]))
    assert moved == [(v, d, "/cpu:0") for v, d in zip(values, devices_of, strict=True)]


def test_the_order_of_additions_matters_to_the_bits():
    """Otherwise the test above could not fail."""
    rng = np.random.default_rng(8)
    values = [rng.normal(size=100).astype("float32") * 10.0 ** e for e in range(-3, 5)]
    in_turn = values[0]
    for value in values[1:]:
        in_turn = in_turn + value
    assert not np.array_equal(in_turn, by_hand(values))


def test_sparse_gradients_are_joined_in_tower_order():
    def slices(value, index):
        return tf.IndexedSlices(tf.constant([[value]]), tf.constant([index]), tf.constant([4, 1]))

    total = tower_sum([slices(1.0, 2), slices(2.0, 0), slices(4.0, 2)], 2)
    assert total.values.numpy().tolist() == [[1.0], [2.0], [4.0]]
    assert total.indices.numpy().tolist() == [2, 0, 2]
    np.testing.assert_array_equal(tf.convert_to_tensor(total), [[2.0], [0.0], [5.0], [0.0]])


def test_a_variable_without_a_gradient_stays_without():
    assert tower_sum([None, None, None], 2) is None
