"""best.keras and final.keras: models that Keras loads without towers."""

from collections.abc import Callable
from pathlib import Path

import keras

from towers.listener import Listener
from towers.machine import watch
from towers.saving import run_dir
from towers.saving.checkpoints import is_finite
from towers.saving.position import Position
from towers.saving.run_dir import Result
from towers.recipe.schedules import plain_schedule


class BestModel(Listener):
    """Writes best.keras after each epoch that is the best so far."""

    def __init__(
        self,
        model: keras.Model,
        directory: Path,
        position: Position,
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            model: what is trained.
            directory: of the run.
            position: where the run stands.
            warn: called with one line where the file cannot be written.
        """
        self._model, self._path = model, directory / run_dir.BEST
        self._position, self._warn = position, warn

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        """Replaces the file if the epoch is the best."""
        if self._position.is_best:
            save_model(self._model, self._path, self._warn)


def save_model(model: keras.Model, path: Path, warn: Callable[[str], None]) -> bool:
    """Whether the model is saved; where that fails, a warning, and what `path` held is intact.

    Values that are not finite are never saved.

    Args:
        model: with its optimizer.
        path: of the file.
        warn: called with one line.
    """
    if not all(is_finite(weight.value.numpy()) for weight in model.weights):
        warn(f"{path} is not written: the model holds NaN or infinite values.")
        return False
    try:
        with watch.at_work(), plain_schedule(getattr(model, "optimizer", None)):
            run_dir.write_atomically(path, model.save)
    except OSError as error:
        warn(f"{path} cannot be written ({error.strerror}); what it held before is intact.")
        return False
    return True
