"""Private names of Keras' callbacks that a fit needs to go on. No other module knows them.

They were found in Keras 3.15. The tests of this module name the part that a new version breaks.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

_HOLDS_AVERAGES, _FINALIZE = "_ema_weights_in_model", "_finalize_ema_values"

# Keras' callbacks keep their counts under these names, and whether averages are in the model. They
# offer no public names. A callback without one of them is left alone.
CALLBACK_FIELDS = (
    "_batches_seen_since_last_saving", "_last_batch_seen",  # ModelCheckpoint, OrbaxCheckpoint
    "_total_batches_seen",  # OrbaxCheckpoint
    "_global_train_batch", "_global_test_batch",  # TensorBoard
    _HOLDS_AVERAGES,  # SwapEMAWeights
)


def says_averages(fields: Mapping[str, Any]) -> bool:
    """Whether the saved fields of a callback say that averages are in the model."""
    return bool(fields.get(_HOLDS_AVERAGES))


class _Finalize:
    """The method by which SwapEMAWeights discards the weights; notes them at first."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self.weights: list[np.ndarray] = []

    def __call__(self) -> None:
        self.weights = self.weights or [variable.numpy() for variable in self._averages()]
        type(self._callback)._finalize_ema_values(self._callback)

    def put_back(self) -> None:
        for variable, value in zip(self._averages(), self.weights, strict=True):
            variable.assign(value)

    def _averages(self) -> list[keras.Variable]:
        """The averages that optimizers keep; the weights, where they are swapped."""
        found: list[keras.Variable] = []

        def find(optimizer: Any) -> None:
            found.extend(optimizer._model_variables_moving_average)

        self._callback._apply_to_ema_optimizers(find, find)
        return found


def note_weights(callbacks: Sequence[Any]) -> None:
    """Makes SwapEMAWeights(swap_on_epoch=True) note the weights before it discards them.

    At the end of the last epoch it has the averages in the model and the weights in the optimizer,
    and copies the averages over the weights. A fit with more epochs resumes from the weights. They
    can be had at no other time: callbacks behind it see the averages in both places.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            vars(callback)[_FINALIZE] = _Finalize(callback)


@contextmanager
def with_weights(callbacks: Sequence[Any]) -> Iterator[None]:
    """Within, the weights that `note_weights` has noted are in the optimizer again."""
    found = [vars(callback).get(_FINALIZE) for callback in callbacks]
    finished = [f for f in found if isinstance(f, _Finalize) and f.weights]
    for finalize in finished:
        finalize.put_back()
    yield
    for finalize in finished:
        finalize()


def finalize_averages(callbacks: Sequence[Any]) -> None:
    """Copies the averages over the weights where they are swapped, as after the last epoch.

    Keras' optimizer then finds the averages where it takes the final weights from.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights) and says_averages(vars(callback)):
            callback._finalize_ema_values()


def forget_initial_epoch(model: keras.Model) -> None:
    """Drops the first epoch that a BackupAndRestore of an earlier fit has left on the model.

    It would win over the one that `fit` is given.
    """
    model._initial_epoch = None
