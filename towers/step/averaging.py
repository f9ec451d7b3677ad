"""T towers' values -> their weighted average: one fixed tree of additions.

    tower:   0   1   2   3   4   5   6   7
              \\ /     \\ /     \\ /     \\ /
               +       +       +       +        each addition on the parameters' device; of GPUs
                \\     /         \\     /         on that of its left child, and one sum leaves for
                   +               +            the parameters' device
                      \\         /
                           +

The shape of the tree depends on the number of towers alone, so the sum has the same bits whichever
device each tower ran on. Towers multiply their losses by w_i / sum(w_i) before the gradient, which
makes the weighted average, sum(w_i * g_i) / sum(w_i), a plain sum.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, Union

import tensorflow as tf

from towers.step.lookups import add_slices
from towers.step.transfers import transfer

Values: TypeAlias = list[Any]  # V of one tower or a sum: tensors, slices as of `lookups`, or None
Tree: TypeAlias = Union[list, tuple["Tree", "Tree"]]  # Values, or the subtrees still to be added


def partial_sums(
    values: Sequence[Values],
    devices: Sequence[str],
    *,
    add_on_devices: bool,
    home: str | None = None,
    packed: bool = False,
) -> Tree:
    """Makes the additions that devices make; returns the tree of all that is still to be added.

    Args:
        values: T towers x V values.
        devices: the device of each tower.
        add_on_devices: make all of them, each on the device of its left child; else none.
        home: the device that what is left of the tree is sent to; None: it stays where it is.
        packed: whether small values travel as one vector a dtype.
    """
    if add_on_devices or len(values) == 1:
        sums = _sum_on_devices(values, devices, packed)
        return sums if home is None else transfer(sums, devices[0], home, packed=packed)
    half_way = _middle(len(values))
    left, right = (
        partial_sums(values[half], devices[half], add_on_devices=False, home=home, packed=packed)
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
    """left + right; `lookups.add_slices` adds slices (gradients of embeddings), None stays None."""
    if left is None:
        return None
    if isinstance(left, tf.IndexedSlices | tuple):
        return add_slices(left, right)
    return left + right


def _sum_on_devices(values: Sequence[Values], devices: Sequence[str], packed: bool) -> Values:
    """V sums, on the first tower's device."""
    if len(values) == 1:
        return values[0]
    half_way = _middle(len(values))
    left = _sum_on_devices(values[:half_way], devices[:half_way], packed)
    right = _sum_on_devices(values[half_way:], devices[half_way:], packed)
    right = transfer(right, devices[half_way], devices[0], packed=packed)
    with tf.device(devices[0]):
        return add_tree((left, right))


def _middle(num_towers: int) -> int:
    """The number of a tree's towers in its left half."""
    return (num_towers + 1) // 2


class Subtree(NamedTuple):
    """A largest subtree of the tree of additions whose towers all have one owner.

    owner: a worker's or device's index. slot: the subtree's among its owner's. towers: the indices.
    """

    owner: int
    slot: int
    towers: range


def subtrees(owners: Sequence[int]) -> list[Subtree]:
    """The subtrees of one owner, in the order of their towers; `owners`: of T towers, ascending."""
    found: list[Subtree] = []
    waiting = [range(len(owners))]
    while waiting:
        towers = waiting.pop()
        owner = owners[towers[0]]
        if owners[towers[-1]] == owner:
            slot = sum(subtree.owner == owner for subtree in found)
            found.append(Subtree(owner, slot, towers))
        else:
            half_way = _middle(len(towers))
            waiting += [towers[half_way:], towers[:half_way]]
    return found


def add_subtrees(sums: Mapping[range, tf.Tensor], towers: range) -> tf.Tensor:
    """The sum over these towers, by the sums of subtrees."""
    if towers in sums:
        return sums[towers]
    half_way = _middle(len(towers))
    left, right = towers[:half_way], towers[half_way:]
    return add_subtrees(sums, left) + add_subtrees(sums, right)
