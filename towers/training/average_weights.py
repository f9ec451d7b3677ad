"""--ema: the averages of the variables take their places at the end of a run, as in Keras."""

import keras

from towers.training.listener import Listener


class AveragedWeights(Listener):
    """What Keras' `fit` does after its last epoch: nothing unless the optimizer keeps averages.

    Epochs are evaluated, and checkpoints and best.keras written, with the variables themselves;
    final.keras holds the averages. A run that goes on thus goes on from the variables.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def end(self) -> None:
        """After the last checkpoint; before callbacks hear of the end, as in Keras."""
        self._optimizer.finalize_variable_values(self._model.trainable_variables)
