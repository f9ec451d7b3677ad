"""TowerOutputs -> averaged gradients and merged state: one fixed tree of additions.

    tower:   0   1   2   3   4   5   6   7
              \\ /     \\ /     \\ /     \\ /
               +       +       +       +        a subtree that lies on one GPU is added there,
                \\     /         \\     /         the rest on the parameters' device
                   +               +
                      \\         /
                           +

The shape of the tree depends on the number of towers alone, so the sum has the same bits whichever
device each tower ran on. Towers scale their losses by w_i / sum(w_i) before the gradient, which
makes the weighted average, sum(w_i * g_i) / sum(w_i), a plain sum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def add_on_devices(
    values: Sequence[list],
    devices: Sequence[str],
    leave: Callable[[list, str], list] = lambda sums, device: sums,
) -> list | tuple:
    """Adds each subtree that lies on one device there, and leaves the rest of the tree to be added.

    Args:
        values: one list for each of T towers: tensors, IndexedSlices and None ("T x V").
        devices: the device of each tower.
        leave: (V sums, their device) -> what takes their place in the tree.

    Returns:
        A list of V sums, or a pair (left subtree, right subtree), as `add_tree` takes it.
    """
    if len(set(devices)) == 1:
        with tf.device(devices[0]):
            sums = add_tree(as_tree(values))
        return leave(sums, devices[0])
    middle = _middle(values)
    left = add_on_devices(values[:middle], devices[:middle], leave)
    right = add_on_devices(values[middle:], devices[middle:], leave)
    return left, right


def as_tree(values: Sequence[list]) -> list | tuple:
    """The tree with all of its additions left to `add_tree`; arguments as for `add_on_devices`."""
    if len(values) == 1:
        return values[0]
    middle = _middle(values)
    return as_tree(values[:middle]), as_tree(values[middle:])


def add_tree(tree: list | tuple) -> list:
    """Adds what `add_on_devices` has left, the upper part of the tree: V sums."""
    if isinstance(tree, list):
        return tree
    left, right = tree
    return [add(a, b) for a, b in zip(add_tree(left), add_tree(right), strict=True)]


def add(left: Any, right: Any) -> Any:
    """left + right; IndexedSlices (gradients of embeddings) are joined, None stays None."""
    if left is None:
        return None
    if isinstance(left, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([left.values, right.values], axis=0),
            tf.concat([left.indices, right.indices], axis=0),
            left.dense_shape,
        )
    return left + right


def weighted(values: Sequence[tf.Tensor | None], weight: tf.Tensor) -> list[tf.Tensor | None]:
    """value * weight for each value, in the value's dtype; None stays None."""
    dtypes = {value.dtype for value in values if value is not None}
    weights = {dtype: tf.cast(weight, dtype) for dtype in dtypes}
    return [None if value is None else value * weights[value.dtype] for value in values]


def _middle(values: Sequence[list]) -> int:
    return (len(values) + 1) // 2
