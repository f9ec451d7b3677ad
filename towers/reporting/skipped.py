"""How long a run that goes on in mid-epoch has read examples only to leave them out."""

import time

from rich.text import Text

from towers.checkpointing.train_state import TrainState
from towers.reporting.formats import format_seconds
from towers.reporting.report import Report, labelled
from towers.training.build import Run
from towers.training.listener import Listener


class SkippedLine(Listener):
    """One line, where the training examples can only be read one after the other."""

    def __init__(self, out: Report, run: Run, train_state: TrainState) -> None:
        self._out, self._run, self._train_state = out, run, train_state
        self._begun: float | None = None

    def begin_epoch(self) -> None:
        if self._run.train.source.is_sequential and self._train_state.epoch_step > 0:
            self._begun = time.monotonic()

    def begin_step(self) -> None:
        """The first batch has come."""
        if self._begun is not None:
            seconds, self._begun = time.monotonic() - self._begun, None
            count = self._train_state.epoch_step * self._run.batch_size
            self._out.line(skipped_line(count, seconds))


def skipped_line(num_examples: int, seconds: float) -> Text:
    """"Data      1,280 examples of this epoch read again and left out, in 0:12"."""
    return labelled(
        "Data",
        f"{num_examples:,} examples of this epoch read again and left out, in "
        f"{format_seconds(seconds)}",
    )
