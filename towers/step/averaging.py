"""T towers' values -> their weighted average: one fixed tree of additions.

    tower:   0   1   2   3   4   5   6   7
              \\ /     \\ /     \\ /     \\ /
               +       +       +       +        a subtree that lies on one GPU is added there,
                \\     /         \\     /         the rest on the parameters' device
                   +               +
                      \\         /
                           +

The shape of the tree depends on the number of towers alone, so the sum has the same bits whichever
device each tower ran on. Towers multiply their losses by w_i / sum(w_i) before the gradient, which
makes the weighted average, sum(w_i * g_i) / sum(w_i), a plain sum.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, Union

import tensorflow as tf

from towers.step.lookups import add_slices

Values: TypeAlias = list[Any]  # V of one tower or a sum: tensors, slices as of `lookups`, or None
Tree: TypeAlias = Union[list, tuple["Tree", "Tree"]]  # Values, or the subtrees still to be added


def partial_sums(
    values: Sequence[Values],
    devices: Sequence[str],
    *,
    add_on_devices: bool,
    leave: Callable[[Values, str], Values] = lambda sums, device: sums,
) -> Tree:
    """Adds on the towers' devices what may be; returns the tree of all that is still to be added.

    Args:
        values: of each of T towers: T x V.
        devices: the device of each tower.
        add_on_devices: add a subtree that lies on one device there; else nothing is added yet.
        leave: (V sums, their device) -> what takes their place in the tree.
    """
    is_subtree = len(values) == 1 or add_on_devices and len(set(devices)) == 1
    if is_subtree:
        with tf.device(devices[0]):
            sums = add_tree(_tree(values))
        return leave(sums, devices[0])
    half_way = middle(len(values))
    left, right = (
        partial_sums(values[half], devices[half], add_on_devices=add_on_devices, leave=leave)
        for half in (slice(half_way), slice(half_way, None))
    )
    return left, right


def add_tree(tree: Tree) -> Values:
    """Makes all additions that are left in a tree: V sums."""
    if isinstance(tree, list):
        return tree
    left, right = tree
    return [add(a, b) for a, b in zip(add_tree(left), add_tree(right), strict=True)]


def add(left: Any, right: Any) -> Any:
    """left + right; slices (gradients of embeddings) as `lookups.add_slices`, None stays None."""
    if left is None:
        return None
    if isinstance(left, tf.IndexedSlices | tuple):
        return add_slices(left, right)
    return left + right


def _tree(values: Sequence[Values]) -> Tree:
    """The tree over all towers, with nothing added yet."""
    if len(values) == 1:
        return values[0]
    half_way = middle(len(values))
    return _tree(values[:half_way]), _tree(values[half_way:])


def middle(num_towers: int) -> int:
    """The number of a tree's towers in its left half."""
    return (num_towers + 1) // 2
