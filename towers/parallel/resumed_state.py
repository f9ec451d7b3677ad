"""What a `fit` with towers.Resume writes into its directory, and finds there again.

    backup/checkpoints/epoch-3-step-1502/      as `saving.checkpoints` has them
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from towers.checkpointing import checkpoints, run_dir
from towers.checkpointing.checkpoints import Checkpoint
from towers.checkpointing.position import Position
from towers.checkpointing.snapshot import (
    assign_arrays,
    callbacks_arrays,
    callbacks_state,
    copy_arrays,
    restore_callbacks,
)

_FIT = "fit"  # in a checkpoint's state: what the fit was; train.py's checkpoints have none
_SEED = "seed"


class Saved:
    """The newest checkpoint of a directory, if there is one."""

    def __init__(self, directory: Path) -> None:
        """Reads it.

        Raises:
            ValueError: all are damaged, or they are of something else.
        """
        found = checkpoints.read_newest(directory / run_dir.CHECKPOINTS)
        self.is_new = found is None
        self.position, self.seed, self._fit = Position(), 0, {}
        if found is None:
            return
        self._path, self._checkpoint, damaged = found
        for line in damaged:
            warnings.warn(line, stacklevel=2)
        state = self._checkpoint.state
        if _FIT not in state:
            raise ValueError(
                f"directory ({directory}) holds the checkpoints of a run of train.py. Name another."
            )
        try:
            self.position = Position.from_json(state["position"])
            self._fit = dict(state[_FIT])
            self.seed = int(self._fit.pop(_SEED))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._path} is no checkpoint of a fit: {error!r}.") from None

    def check(self, fit: Mapping[str, Any]) -> None:
        """Raises ValueError where the checkpoint was written by another fit than this one.

        Args:
            fit: what its bits depend on, by name; plain values.
        """
        names = [n for n in sorted({*self._fit, *fit}) if self._fit.get(n) != fit.get(n)]
        if self.is_new or not names:
            return
        listed = ", ".join(f"{n} ({self._fit.get(n)} then, {fit.get(n)} now)" for n in names)
        raise ValueError(
            f"{self._path} belongs to another fit: {listed}. Start as then, or name another "
            "directory."
        )

    def restore(self, variables: Mapping[str, Sequence[keras.Variable]]) -> None:
        """Gives variables their values back; nothing where there is no checkpoint.

        Raises:
            ValueError: they are not those that were saved.
        """
        if not self.is_new:
            assign_arrays(variables, self._checkpoint.arrays, self._path)

    def restore_callbacks(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Gives callbacks back what they remembered."""
        if not self.is_new:
            states = self._checkpoint.state.get("callbacks", [])
            restore_callbacks(callbacks, states, self._checkpoint.arrays, _warn)


class Saver:
    """Writes checkpoints."""

    def __init__(
        self,
        directory: Path,
        fit: Mapping[str, Any],
        seed: int,
        variables: Mapping[str, Sequence[keras.Variable]],
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        """
        Args:
            directory: of all checkpoints.
            fit: see `Saved.check`.
            seed: of the examples' order.
            variables: all that the next steps depend on.
            callbacks: the user's.
        """
        self._checkpoints = directory / run_dir.CHECKPOINTS
        self._fit = {**fit, _SEED: seed}
        self._variables, self._callbacks = variables, list(callbacks)
        self._writer = checkpoints.Writer(_warn)

    def save(self, position: Position) -> None:
        """Copies the state, and begins to write it."""
        arrays = {**copy_arrays(self._variables), **callbacks_arrays(self._callbacks)}
        state: dict[str, Any] = {
            "position": position.to_json(),
            _FIT: self._fit,
            "callbacks": callbacks_state(self._callbacks, _warn),
        }
        path = checkpoints.path_of(self._checkpoints, position.epoch, position.step)
        self._writer.write(path, Checkpoint(state, arrays), None)

    def wait(self) -> bool:
        """Waits until nothing is being written; whether the last checkpoint is on the disk."""
        return self._writer.wait()

    def fault(self) -> str | None:
        """Waits likewise; why the last checkpoint is not on the disk, of which nobody is warned."""
        return self._writer.fault()

    def close(self) -> None:
        """Waits until nothing is being written."""
        self.wait()

    def newest_step(self) -> int | None:
        """The updates that the newest checkpoint holds; None where there is none."""
        newest = next(iter(checkpoints.find(self._checkpoints)), None)
        return None if newest is None else checkpoints.step_of(newest)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
