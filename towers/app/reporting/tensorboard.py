"""Writes scalars and histograms to RUN/tensorboard/, for `tensorboard --logdir=runs`."""

import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from towers.machine import hang

FOLDER = "tensorboard"  # in the run directory
_WRITES = ("on_train_begin", "on_test_begin", "on_test_end", "on_epoch_end", "on_train_end")


def check_installed() -> None:
    """Raises ValueError if the package tensorboard, which shows the log, is missing."""
    try:
        importlib.import_module("tensorboard.version")
    except ImportError as error:
        raise ValueError(
            f"`tensorboard` needs the package tensorboard: {error}. Install it with: "
            "pip install 'tf-towers[tensorboard]'"
        ) from None


class TensorBoardLog(keras.callbacks.TensorBoard):
    """Writes Keras' log of epochs; if it cannot be written any more, it warns and stops.

    An epoch that a resumed run repeats appears twice in the log, with equal values.
    """

    def __init__(
        self, directory: Path, warn: Callable[[str], None], histograms: bool = False
    ) -> None:
        """
        Args:
            directory: the folder for the event files.
            warn: a function that shows one line.
            histograms: whether to write histograms of the parameters after each epoch, too.
        """
        super().__init__(str(directory), histogram_freq=int(histograms), write_graph=False)
        self._tell: Callable[[str], None] | None = warn
        for moment in _WRITES:
            setattr(self, moment, partial(self._written, getattr(self, moment)))

    def _written(self, write: Callable[..., None], *arguments: Any) -> None:
        if self._tell is None:
            return
        try:
            with hang.within(f"writing {FOLDER}"):
                write(*arguments)
        except (OSError, tf.errors.OpError) as error:
            warn, self._tell = self._tell, None
            reason = getattr(error, "message", str(error)).splitlines()[0]
            reason = re.sub(r"\{\{.*?\}\} ?", "", reason)  # TensorFlow's name of the operation
            warn(f"{self.log_dir} cannot be written any more ({reason}); training continues.")
