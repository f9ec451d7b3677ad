"""Makes the remaining additions of the tree and one update: arrows 4 and 5 of step.py."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.graph.merged import merge_repeats
from towers.machine.devices import short_name
from towers.machine.tensorflow_internals import custom_gradients_forgotten
from towers.step import structures
from towers.step.averaging import Tree, Values, add_tree
from towers.step.lookups import join_lookups


def update(
    tree: Tree, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> tuple[tf.Tensor, Values]:
    """Makes the remaining additions and calls the optimizer, once, in one compiled program.

    The remaining additions depend only on the number of towers and the policy, not on the number of
    devices. Otherwise bits could differ: XLA may round a * b + c once or twice.

    tree: `partial_sums` of [loss, V gradients ..., S statistics ...] over the towers.
    optimizer: an optimizer built for `variables`, the V trainable variables.

    Returns (loss, S statistics) of the global batch.
    """
    def update_program(tree: Tree) -> tuple[tf.Tensor, Values]:
        with tf.name_scope(structures.SUM):
            loss, *sums = add_tree(tree)
        optimizer.apply([join_lookups(g, v.shape) for g, v in zip(sums, variables)], variables)
        return merge_repeats((loss, sums[len(variables):]))

    with custom_gradients_forgotten():
        if not any(isinstance(value, tf.IndexedSlices) for value in tf.nest.flatten(tree)):
            function = tf.function(update_program, autograph=False, jit_compile=True)
            traced = function.get_concrete_function(tree)
            if len({short_name(variable.device) for variable in traced.graph.variables}) <= 1:
                return traced(tree)
        # XLA can compile neither IndexedSlices nor variables on several devices.
        return tf.function(update_program, autograph=False)(tree)
