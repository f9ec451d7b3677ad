"""The lines of a run's epochs: a bar that moves, two lines after each, what was left out."""

import time
from typing import Any

import keras
from rich.text import Text

from towers.resume.train_state import TrainState
from towers.machine.words import counted
from towers.app.reporting.formats import format_seconds
from towers.app.reporting.outcome import num_skipped, skipped_warning
from towers.app.reporting.report import Progress, Report, epoch_label, labelled
from towers.app.training.build import Run
from towers.app.training.pace import Pace


class ProgressLines(keras.callbacks.Callback):
    """Shows where the run stands.

    The loss stays where it was computed, and is read back only when it is shown.
    """

    def __init__(self, out: Report, run: Run, train_state: TrainState, pace: Pace) -> None:
        """
        Args:
            out: where the lines go.
            run: what is trained.
            train_state: where the run stands.
            pace: how fast it goes.
        """
        super().__init__()
        self._out, self._run, self._train_state, self._pace = out, run, train_state, pace
        self._skipped_before = 0
        self._trained: Progress | None = None
        self._reads_again_since: float | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._out.waiting(f"{self._epoch()}  preparing the first step")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._skipped_before = num_skipped(self._run, self._train_state)
        if self._run.train.source.is_sequential and self._train_state.epoch_step > 0:
            self._reads_again_since = time.monotonic()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Says what was read again, once the first batch behind it has come."""
        if self._reads_again_since is not None:
            seconds, self._reads_again_since = time.monotonic() - self._reads_again_since, None
            self._out.line(skipped_line(batch * self._run.batch_size, seconds))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._out.is_due():
            self._out.progress(self._progress())

    def on_test_begin(self, logs: Any = None) -> None:
        """Warns of the epoch's updates that were left out."""
        self._trained = self._progress()
        self._out.waiting(f"{self._epoch()}  validating")
        count = num_skipped(self._run, self._train_state) - self._skipped_before
        if count > 0:
            scale = getattr(self._run.step.optimizer, "dynamic_scale", None)
            self._out.warn(skipped_warning(count, None if scale is None else float(scale)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Shows the epoch's two lines."""
        assert self._trained is not None
        progress = self._trained._replace(seconds_left=self._pace.seconds_left)
        validation = {k: value for k, value in logs.items() if k not in self._run.metrics}
        self._out.end_epoch(progress, validation, self._train_state.is_best)

    def _epoch(self) -> str:
        return epoch_label(self._train_state.epoch + 1, self._run.config.epochs)

    def _progress(self) -> Progress:
        train_state = self._train_state
        return Progress(
            train_state.epoch + 1,
            self._run.config.epochs,
            train_state.epoch_step,
            self._run.steps_an_epoch,
            {name: float(train_state.logs[name]) for name in self._run.metrics},
            self._pace.examples_per_second,
            self._pace.seconds_left,
        )


def skipped_line(num_examples: int, seconds: float) -> Text:
    """"Data      1,280 examples of this epoch read again and left out, in 0:12"."""
    return labelled(
        "Data",
        f"{counted(num_examples, 'example')} of this epoch read again and left out, in "
        f"{format_seconds(seconds)}",
    )
