"""Holds the private names of Keras' callbacks that resuming needs, as found in Keras 3.15."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import keras
import numpy as np

_HOLDS_AVERAGES, _FINALIZE = "_ema_weights_in_model", "_finalize_ema_values"

# Keras' callbacks keep their counts in these attributes, and whether the model holds averages.
CALLBACK_FIELDS = (
    "_batches_seen_since_last_saving",
    "_last_batch_seen",  # ModelCheckpoint, OrbaxCheckpoint
    "_total_batches_seen",  # OrbaxCheckpoint
    "_global_train_batch",
    "_global_test_batch",  # TensorBoard
    _HOLDS_AVERAGES,  # SwapEMAWeights
)


def says_averages(fields: Mapping[str, object]) -> bool:
    """Returns whether a callback's saved fields say that the model holds the averages."""
    return bool(fields.get(_HOLDS_AVERAGES))


class _Finalize:
    """Replaces the method in which SwapEMAWeights discards the weights; keeps a copy first."""

    def __init__(self, callback: keras.callbacks.SwapEMAWeights) -> None:
        self._callback = callback
        self.weights: list[np.ndarray] = []

    def __call__(self) -> None:
        self.weights = self.weights or [variable.numpy() for variable in self._averages()]
        type(self._callback)._finalize_ema_values(self._callback)

    def put_back(self) -> None:
        for variable, value in zip(self._averages(), self.weights, strict=True):
            variable.assign(value)

    def _averages(self) -> list[keras.Variable]:
        """Returns the optimizers' average variables; after a swap they hold the weights."""
        found: list[keras.Variable] = []

        def find(optimizer: keras.optimizers.Optimizer) -> None:
            found.extend(optimizer._model_variables_moving_average)

        self._callback._apply_to_ema_optimizers(find, find)
        return found


def note_weights(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Makes SwapEMAWeights(swap_on_epoch=True) keep a copy of the weights that it discards.

    At the end of the last epoch, it copies the model's averages over the optimizer's weights, but a
    fit with more epochs resumes from the weights. Later callbacks see the averages in both places.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            vars(callback)[_FINALIZE] = _Finalize(callback)


@contextmanager
def with_weights(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Inside the context, the optimizer holds the weights that `note_weights` has copied."""
    found = [vars(callback).get(_FINALIZE) for callback in callbacks]
    finished = [f for f in found if isinstance(f, _Finalize) and f.weights]
    for finalize in finished:
        finalize.put_back()
    yield
    for finalize in finished:
        finalize()


def finalize_averages(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Copies swapped averages over the optimizer's weights, which Keras makes the final ones."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights) and says_averages(vars(callback)):
            callback._finalize_ema_values()


def forget_initial_epoch(model: keras.Model) -> None:
    """Removes the initial epoch of an earlier BackupAndRestore, which Keras would use in `fit`."""
    model._initial_epoch = None
