"""Copies of an optimizer's variables on the parameters' device, for a program of one device.

    before the program   copy <- variable          the variable may lie on any device
    the program          reads and assigns the copy
    after the program    copy -> variable

What is made outside of `tf.device` lies on a GPU where there is one: the iterations and the
learning rate of an optimizer, which an XLA program on /cpu:0 cannot reach. Slots lie beside their
parameters, wherever they were made: Keras sees to it. The variables stay where they are, as
callbacks, checkpoints and functions that were traced before know them there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
import tensorflow as tf

from towers.machine.devices import short_name
from towers.machine.keras_internals import stored_in


class Copies:
    """The copies of one step, made as they are first needed."""

    def __init__(self, home: str) -> None:
        """Args: home: the device of the copies."""
        self._home = home
        self._copies: dict[int, tf.Variable] = {}  # what is traced does not keep them alive

    @contextmanager
    def used(
        self, optimizer: keras.optimizers.Optimizer, parameters: Sequence[keras.Variable]
    ) -> Iterator[None]:
        """Within, the optimizer's variables that lie elsewhere are read and assigned at home.

        Not where a parameter lies elsewhere, too: its slots are with it, and no program of one
        device can update both.
        """
        away = [] if self._away(parameters) else self._away(optimizer.variables)
        copies = [self._copy(v) for v in away]
        for variable, copy in zip(away, copies, strict=True):
            copy.assign(variable.value)
        with stored_in(away, copies):
            yield
        for variable, copy in zip(away, copies, strict=True):
            variable.value.assign(copy)

    def _away(self, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
        return [v for v in variables if short_name(v.value.device) != self._home]

    def _copy(self, variable: keras.Variable) -> tf.Variable:
        if id(variable) not in self._copies:
            with tf.init_scope(), tf.device(self._home):
                self._copies[id(variable)] = tf.Variable(
                    tf.zeros(variable.shape, variable.dtype), name=variable.name
                )
        return self._copies[id(variable)]
