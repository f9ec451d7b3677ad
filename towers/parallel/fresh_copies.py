"""Refreshes the parameter copies on the devices when code between steps may change parameters.

begin   epoch: step 1  step 2  step 3 ...   evaluation: batch 1  batch 2 ...   epoch ...
          refresh: ^                          refresh: ^               refresh: ^
"""

from collections.abc import Callable, Sequence
from functools import partialmethod

import keras

from towers.divide.copies import Copies, NoCopies
from towers.machine.user_lines import warn_user
from towers.parallel.model_state import Towers
from towers.resume.resumed_fit import fit_arguments
from towers.resume.train_state import Logs

_BATCH_HOOKS = (
    "on_batch_begin",
    "on_batch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_batch_begin",
    "on_test_batch_end",
)
_OURS = ("keras.", "towers.")  # their hooks assign to no parameter between two steps


def are_trusted(callbacks: Sequence[keras.callbacks.Callback], copies: Copies | NoCopies) -> bool:
    """Returns whether no callback can assign to parameters between steps; warns if one can."""
    names = [
        type(callback).__name__
        for callback in callbacks
        for hook in _BATCH_HOOKS
        if not str(getattr(getattr(callback, hook), "__module__", None)).startswith(_OURS)
    ]
    if names and copies.num_copies:
        warn_user(
            f"strategy=mirrored or sharded: {', '.join(dict.fromkeys(names))} may assign to "
            f"parameters between steps, so that {copies.num_bytes / 1e6:.1f} MB are copied to "
            f"each of {copies.num_copies} devices before every step. Use a callback without "
            "hooks of batches, or strategy=parameter_server.",
        )
    return not names


def with_fresh_copies(
    fit: Callable[..., keras.callbacks.History], towers: Towers
) -> Callable[..., keras.callbacks.History]:
    """Adds a `_FreshCopies` to Keras' `fit`. With a CallbackList, each step refreshes copies."""

    def fit_with_one_more(*args: object, **kwargs: object) -> keras.callbacks.History:
        arguments = fit_arguments(*args, **kwargs)
        given = arguments["callbacks"]
        if not isinstance(given, keras.callbacks.CallbackList):
            others = [callback for callback in keras.tree.flatten(given) if callback is not None]
            arguments["callbacks"] = [_FreshCopies(towers, others), *others]
        return fit(**arguments)

    return fit_with_one_more


class _FreshCopies(keras.callbacks.Callback):
    """Tells the strategy when parameters may have changed outside of a step.

    It must be the first callback: an `evaluate` that a later callback calls then sees new values.
    """

    def __init__(self, towers: Towers, others: list[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._towers, self._others = towers, others
        self._are_trusted: bool | None = None

    def _trust(self, is_trusted: bool, *_: object, logs: Logs | None = None) -> None:
        copies = self._towers.copies
        if is_trusted and self._are_trusted is None:  # after the first step, which makes copies
            self._are_trusted = are_trusted(self._others, copies)
        copies.trust(is_trusted and bool(self._are_trusted))

    on_epoch_begin = on_epoch_end = on_test_begin = on_test_end = partialmethod(_trust, False)
    on_train_batch_end = on_test_batch_end = partialmethod(_trust, True)
