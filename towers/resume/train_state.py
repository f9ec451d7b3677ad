"""Holds the step, epoch and history of a run as plain values for a checkpoint."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from towers.resume.stateful import Json

Logs: TypeAlias = dict[str, float]  # means of an epoch so far, by the name of the metric


@dataclasses.dataclass
class TrainState:
    """Holds the point that a run has reached. Checkpoints hold all fields except `in_step`."""

    step: int = 0  # updates in all epochs
    epoch: int = 0  # complete epochs
    epoch_step: int = 0  # updates in this epoch
    logs: Logs = dataclasses.field(default_factory=dict)  # this epoch's running means
    history: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # of complete epochs
    results: list[list[object]] = dataclasses.field(
        default_factory=list
    )  # a row for each complete epoch
    best: float | None = None  # the best epoch's monitored value, negated if lower is better
    best_loss: float | None = None  # its val_loss, or loss; None in checkpoints of older versions
    best_step: int | None = None  # the number of updates when the best epoch ended
    best_saved: int | None = None  # the step whose weights best.keras holds
    epochs_since_best: int = 0  # complete epochs without a better monitored value
    stopped: bool = False  # whether a callback has ended the run
    in_step: bool = False  # whether an update is under way, so variables may be inconsistent

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainState":
        """Makes a TrainState from a result of `to_json`. An unknown field raises TypeError."""
        return cls(**values)

    def to_json(self) -> dict[str, Json]:
        """Returns a copy as plain values. Later steps do not change it."""
        logs = {name: plain(value) for name, value in self.logs.items()}
        values = {
            **vars(self),
            # A callback may have put other objects beside the means.
            "logs": {name: v for name, v in logs.items() if isinstance(v, int | float)},
            "history": {name: list(map(plain, v)) for name, v in self.history.items()},
            "results": list(self.results),
        }
        del values["in_step"]
        return values

    def add_step(self, logs: Logs) -> None:
        """Counts one more update, and keeps its logs."""
        self.step += 1
        self.epoch_step += 1
        self.logs = logs
        self.in_step = False

    def end_epoch(
        self, row: list[object], logs: Mapping[str, float], score: tuple[float, float] | None
    ) -> None:
        """Counts the epoch under way as complete, after its validation.

        The epoch with the highest score is the best, and then the first. A better second number
        alone does not postpone early stopping.

        row: the epoch's row in a table. logs: the means of the epoch by column. score: (monitored
            value, -loss), higher for a better epoch; None for an epoch that is never the best.
        """
        self.epochs_since_best += 1
        if score is not None:
            if self.best is None or score[0] > self.best:
                self.epochs_since_best = 0
            if self.best_loss is None:
                known = -math.inf
            else:
                known = self.best_loss
            if self.best is None or score > (self.best, -known):
                (self.best, _), self.best_loss, self.best_step = score, -score[1], self.step
        self.results.append(row)
        self.epoch, self.epoch_step, self.logs = self.epoch + 1, 0, {}
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def give_history(self, history: Any) -> None:
        """Copies the complete epochs of all processes to keras.callbacks.History."""
        num_epochs = max(map(len, self.history.values()), default=0)
        history.epoch = list(range(self.epoch - num_epochs, self.epoch))
        history.history = {name: list(values) for name, values in self.history.items()}

    def take_history(self, history: Any) -> None:
        """Copies the values of keras.callbacks.History."""
        self.history = {name: list(values) for name, values in history.history.items()}

    @property
    def newest_loss(self) -> float | None:
        """Returns the mean loss of the epoch under way, or of the last one; None at step 0."""
        return self.logs.get("loss", next(reversed(self.history.get("loss", [])), None))

    @property
    def is_best(self) -> bool:
        """Returns whether the epoch that has just ended is the best so far."""
        return self.best_step == self.step

    def is_stopped(self, patience: int | None) -> bool:
        """Returns whether a callback, or `patience` epochs without a better one, ended the run."""
        return self.stopped or patience is not None and self.epochs_since_best >= patience


def plain(value: object) -> Any:
    """Converts a NumPy number, or a tensor of one number, to a Python number."""
    value = value.numpy() if hasattr(value, "numpy") else value
    if hasattr(value, "item"):
        return value.item()
    return value
