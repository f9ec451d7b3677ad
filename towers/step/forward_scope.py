"""Keras' variables while a tower computes: reads are what it is fed, assignments are recorded.

A parameter that a layer assigns (SpectralNormalization) keeps its gradient, as in Keras: tapes know
the variable, not how its new value was made.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.step.gathering import NeedsOtherTowers


class ForwardScope(keras.StatelessScope):
    """Within, variables have the values that a tower is fed."""

    def __init__(
        self,
        trainable: Sequence[tuple[keras.Variable, tf.Tensor]],
        others: Sequence[tuple[keras.Variable, tf.Tensor]],
    ) -> None:
        """
        Args:
            trainable: the trainable variables and their values.
            others: the state, and what else may be assigned.
        """
        super().__init__(state_mapping=[*trainable, *others], collect_losses=True)
        self._parameters = {id(variable): value for variable, value in trainable}
        self._known = {id(variable) for variable, _ in [*trainable, *others]}
        self._foreign: list[keras.Variable] = []

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """What a layer assigns."""
        variable, value = update
        if id(variable) not in self._known:
            self._foreign.append(variable)
        parameter = self._parameters.get(id(variable))
        if parameter is not None:
            value = tf.stop_gradient(value) + (parameter - tf.stop_gradient(parameter))
        super().add_update((variable, value))

    def check_closed(self, model: keras.Model) -> None:
        """Raises NeedsOtherTowers where a layer has assigned what is none of these variables.

        Such as a metric's in a layer, or the seed of a generator that Keras does not track.
        """
        if self._foreign:
            names = ", ".join(sorted({variable.path for variable in self._foreign}))
            raise NeedsOtherTowers(
                f"model {model.name!r} assigns variables that are no weights of it: {names}. Use "
                "towers.make_parallel(model, gpus), whose fit carries metrics and seeds wherever "
                "they are; or create weights with add_weight, and give random operations a "
                "keras.random.SeedGenerator of the layer's own."
            )
