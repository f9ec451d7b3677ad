"""The last two steps of the diagram: what is left of the tree of additions, and one update.

On CPUs both are one XLA program: one pass over memory instead of two. Of two programs that differ,
XLA may round a * b + c once in one and twice in the other: so all additions are in it, and it is
the same on any number of devices. With GPUs the tree that is left depends on their number; what is
compiled with the update then does not.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.averaging import add_tree


def update(
    tree: Any,
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    *,
    in_one: bool,
    jit_compile: bool,
) -> list:
    """Averages and calls the optimizer, once; returns [loss, BatchNorm statistics ...].

    Args:
        tree: of [loss, V gradients ..., BatchNorm statistics ...], as `add_tree` takes it.
        optimizer: built for the variables.
        variables: the V trainable variables.
        in_one: compile additions and update together.
        jit_compile: with XLA, which knows no IndexedSlices.
    """

    def average(tree: Any) -> list:
        with tf.name_scope("sum"):
            return add_tree(tree)

    def apply(averaged: list) -> list:
        loss, *values = averaged
        optimizer.apply(values[: len(variables)], variables)
        return [loss, *values[len(variables):]]

    def average_and_apply(tree: Any) -> list:
        return apply(average(tree))

    compiled = functools.partial(tf.function, autograph=False, jit_compile=jit_compile)
    if in_one:
        return compiled(average_and_apply)(tree)
    return compiled(apply)(compiled(average)(tree))
