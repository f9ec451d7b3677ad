"""Averages the values of T towers with one fixed tree of additions.

    tower:   0   1   2   3   4   5   6   7
              \\ /     \\ /     \\ /     \\ /
               +       +       +       +        With CPUs, the parameter device adds.
                \\     /         \\     /         With GPUs, the left child's GPU adds, and the
                   +               +            total moves to the parameter device.
                      \\         /
                           +

The shape of the tree depends on the number of towers alone. The sum therefore has the same bits
whichever device each tower ran on. Towers multiply their losses by w_i / sum(w_i) before the
gradient. The weighted average sum(w_i * g_i) / sum(w_i) is then a plain sum.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, Union

import tensorflow as tf

from towers.step.lookups import add_slices
from towers.step.transfers import transfer

Values: TypeAlias = list[Any]  # V tensors, slices (see `lookups`) or None: one tower's, or sums
Tree: TypeAlias = Union[list, tuple["Tree", "Tree"]]  # Values, or the subtrees still to be added


def partial_sums(
    values: Sequence[Values],
    devices: Sequence[str],
    *,
    add_on_devices: bool,
    parameter_device: str | None = None,
    packed: bool = False,
) -> Tree:
    """Makes all additions on the towers' devices, or none; returns the tree of the rest.

    Args:
        values: T towers x V values.
        devices: the device of each tower.
        add_on_devices: make all additions, each on its left child's device; else make none.
        parameter_device: the device that receives the rest of the tree; None leaves it where it is.
        packed: whether small values travel as one vector for each dtype.
    """
    if add_on_devices or len(values) == 1:
        sums = _sum_on_devices(values, devices, packed)
        if parameter_device is None:
            return sums
        return transfer(sums, devices[0], parameter_device, packed=packed)
    half_way = _middle(len(values))
    left, right = (
        partial_sums(
            values[half], devices[half], add_on_devices=False, parameter_device=parameter_device,
            packed=packed,
        )
        for half in (slice(half_way), slice(half_way, None))
    )
    return left, right


def add_tree(tree: Tree) -> Values:
    """Makes the remaining additions of a tree; returns V sums."""
    if isinstance(tree, list):
        return tree
    left, right = tree
    return [add(a, b) for a, b in zip(add_tree(left), add_tree(right), strict=True)]


def add(left: Any, right: Any) -> Any:
    """Returns left + right; `lookups.add_slices` adds embedding gradients, and None stays None."""
    if left is None:
        return None
    if isinstance(left, tf.IndexedSlices | tuple):
        return add_slices(left, right)
    return left + right


def _sum_on_devices(values: Sequence[Values], devices: Sequence[str], packed: bool) -> Values:
    """Returns V sums, on the first tower's device."""
    if len(values) == 1:
        return values[0]
    half_way = _middle(len(values))
    left = _sum_on_devices(values[:half_way], devices[:half_way], packed)
    right = _sum_on_devices(values[half_way:], devices[half_way:], packed)
    right = transfer(right, devices[half_way], devices[0], packed=packed)
    with tf.device(devices[0]):
        return add_tree((left, right))


def _middle(num_towers: int) -> int:
    """Returns the number of towers in the left half of a tree."""
    return (num_towers + 1) // 2


class Subtree(NamedTuple):
    """Names a maximal subtree of the additions whose towers all belong to one owner.

    owner: a worker's or device's index. slot: counts the owner's subtrees. towers: their indices.
    """

    owner: int
    slot: int
    towers: range


def subtrees(owners: Sequence[int]) -> list[Subtree]:
    """Splits the tree by owner, in tower order; `owners`: the T towers' owners, ascending."""
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
    """Returns the sum over `towers`, given the sum of each subtree."""
    if towers in sums:
        return sums[towers]
    half_way = _middle(len(towers))
    left, right = towers[:half_way], towers[half_way:]
    return add_subtrees(sums, left) + add_subtrees(sums, right)
