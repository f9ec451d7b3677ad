"""Keeps the models of the `--keep_best` best epochs: best-epoch-3.keras, best-epoch-7.keras."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from towers.app.reporting.run_files import columns_of, save_model
from towers.app.training.build import Run
from towers.machine.places import LostDirectoryError
from towers.resume.train_state import TrainState
from towers.step.errors import NonFiniteError


class KeptModels(keras.callbacks.Callback):
    """Writes the model of each epoch that is among the best, and removes the others' files.

    If a file cannot be written, it warns, removes none, and the run continues.
    """

    def __init__(
        self, run: Run, directory: Path, train_state: TrainState, warn: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._run, self._directory, self._warn = run, directory, warn
        self._train_state = train_state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        run = self._run
        ranked = run.monitor.ranked(columns_of(run, self._train_state))
        kept = [f"best-epoch-{index + 1}.keras" for index in ranked[: run.config.keep_best]]
        name = f"best-epoch-{epoch + 1}.keras"
        if name in kept:
            try:
                save_model(run.step.model, self._directory / name)
            except (NonFiniteError, LostDirectoryError) as error:
                self._warn(str(error))
                return
        # A resumed run computes later epochs again, so their files go, too.
        for path in self._directory.glob("best-epoch-*.keras"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
