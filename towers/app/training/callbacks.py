"""The user's Keras callbacks, by name or as objects."""

from collections.abc import Sequence
from typing import Any

import keras

from towers.app import named


def load(spec: str | None) -> list[keras.callbacks.Callback]:
    """The callbacks that a user's function returns; none without one.

    Args:
        spec: "package.module:function"; the function takes no arguments.

    Raises:
        ValueError: it cannot be imported, or returns something else.
    """
    if spec is None:
        return []
    returned = named.import_function(spec, "callbacks")()
    if not isinstance(returned, list | tuple):
        raise ValueError(
            f"callbacks ({spec!r}) returned {type(returned).__name__}; it must be a list of "
            "keras.callbacks.Callback."
        )
    check(returned, f"callbacks ({spec!r}) returned")
    return list(returned)


def check(callbacks: Sequence[Any], what: str) -> None:
    """Raises ValueError where one of them is no Keras callback, or one that resumes a fit.

    Args:
        callbacks: the user's.
        what: the beginning of the sentence.
    """
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(
                f"{what} {callback!r}, which is no keras.callbacks.Callback; give instances of it."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                f"{what} a BackupAndRestore, which would replace the weights of a run. The run "
                "saves checkpoints already: leave BackupAndRestore out, and resume the run's "
                "directory."
            )
