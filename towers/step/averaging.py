"""Adds the values of T towers with one fixed tree of additions.

    tower:   0   1   2   3   4   5   6   7
              \\ /     \\ /     \\ /     \\ /
               +       +       +       +        With CPUs, the parameter device adds.
                \\     /         \\     /         With GPUs, the left child's GPU adds, and the
                   +               +            total moves to the parameter device.
                      \\         /
                           +

The shape of the tree depends on the number of towers alone. The sum therefore has the same bits
whichever device each tower ran on.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, Union

import tensorflow as tf

from towers.machine.devices import Policy
from towers.step.transfers import transfer

Values: TypeAlias = list[tf.Tensor]  # V tensors: one tower's, or sums
Tree: TypeAlias = Union[list, tuple["Tree", "Tree"]]  # Values, or the subtrees still to be added


def partial_sums(
    values: Sequence[Values], devices: Sequence[str], policy: Policy,
    parameter_device: str | None = None,
) -> Tree:  # fmt: skip
    """Makes all additions, each on its left child's device, or none; returns the tree of the rest.

    values: T towers x V values. devices: the device of each tower. policy: whether devices add, and
    whether small values travel packed. parameter_device: receives the rest of the tree, unless
    None.
    """
    assert len(values) == len(devices), "each tower has a device"
    tree: Tree = values[0]
    if len(values) > 1:
        target = None if policy.add_on_devices else parameter_device
        left, right = (
            partial_sums(values[half], devices[half], policy, target)
            for half in _halves(len(values))
        )
        if not policy.add_on_devices:
            return left, right
        of_right = devices[_halves(len(values))[1]][0]
        with tf.device(devices[0]):
            tree = add_tree(
                (left, transfer(right, of_right, devices[0], packed=policy.pack_transfers))
            )
    if parameter_device is None:
        return tree
    return transfer(tree, devices[0], parameter_device, packed=policy.pack_transfers)


def _halves(num_towers: int) -> tuple[slice, slice]:
    """Returns which towers are in the left and the right half of a tree."""
    half_way = (num_towers + 1) // 2
    return slice(half_way), slice(half_way, None)


def add_tree(tree: Tree) -> Values:
    """Makes the remaining additions of a tree; returns V sums."""
    if isinstance(tree, list):
        return tree
    left, right = tree
    return [a + b for a, b in zip(add_tree(left), add_tree(right), strict=True)]


def subtrees(owners: Sequence[int]) -> list[tuple[int, range]]:
    """Returns (owner, towers) of each maximal subtree of one owner, given each tower's, sorted."""
    pairs = []
    waiting = [range(len(owners))]
    while waiting:
        towers = waiting.pop()
        owner = owners[towers[0]]
        if owners[towers[-1]] == owner:
            pairs.append((owner, towers))
        else:
            left, right = _halves(len(towers))
            waiting += [towers[right], towers[left]]
    assert [t for _, towers in pairs for t in towers] == list(range(len(owners)))
    return pairs


def add_subtrees(sums: Mapping[range, tf.Tensor], towers: range) -> tf.Tensor:
    """Returns the sum over `towers`, given the sum of each subtree."""
    if towers in sums:
        return sums[towers]
    left, right = _halves(len(towers))
    return add_subtrees(sums, towers[left]) + add_subtrees(sums, towers[right])
