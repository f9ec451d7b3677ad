"""Holds the step, epoch and history of a run as plain values for a checkpoint.

It finds the best epoch by a column of results.csv, and when to stop waiting for a better one.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_DEFAULTS = ("val_accuracy", "val_loss", "loss")  # the first one that is a column is used


class Monitor(NamedTuple):
    """Names a column of results.csv. Its highest or lowest value marks the best epoch."""

    column: str = "val_accuracy"
    highest: bool = True

    def score(self, logs: Mapping[str, float]) -> tuple[float, float] | None:
        """Returns (score, -loss), higher for a better epoch; None if one is not finite.

        Accuracies are often equal, so the loss decides between them: val_loss with validation.
        """
        value = logs[self.column]
        loss = logs.get("val_loss", logs.get("loss", 0.0))
        return (value if self.highest else -value, -loss) if math.isfinite(value + loss) else None

    def best_index(self, columns: Mapping[str, Sequence[float]]) -> int | None:
        """Returns the index of the best epoch, the first of equal ones; None if there is none."""
        return next(iter(self.ranked(columns)), None)

    def ranked(self, columns: Mapping[str, Sequence[float]]) -> list[int]:
        """Returns the indices of the epochs with finite values, from the best to the worst."""
        used = [name for name in {self.column, "loss", "val_loss"} if name in columns]
        epochs = zip(*(columns[name] for name in used), strict=False)
        scores = [self.score(dict(zip(used, epoch, strict=True))) for epoch in epochs]
        found = [(score, -index) for index, score in enumerate(scores) if score is not None]
        return [-index for _, index in sorted(found, reverse=True)]


def find_monitor(
    column: str | None, mode: str, directions: Mapping[str, str | None], columns: Sequence[str]
) -> Monitor:
    """Returns the monitor for the options of a user.

    column: a column, or None for the first of val_accuracy, val_loss and loss that exists.
    mode: "min", "max", or "auto" for the direction that Keras gives the metric.
    directions: "up", "down" or None (unknown) for the loss and each metric.
    columns: the loss and the metrics of results.csv, and their val_ columns.
    """
    if column is None:
        column = next(name for name in _DEFAULTS if name in columns)
    if column not in columns:
        raise ValueError(f"monitor ({column!r}) must be a column: {', '.join(columns)}.")
    if mode != "auto":
        return Monitor(column, mode == "max")
    direction = directions[column if column in directions else column.removeprefix("val_")]
    if direction is None:
        raise ValueError(
            f"monitor ({column!r}): Keras does not know whether its highest or its lowest value is "
            "the best. Say it with monitor_mode=max or monitor_mode=min."
        )
    return Monitor(column, direction == "up")


@dataclasses.dataclass
class TrainState:
    """Holds the point that a run has reached. Checkpoints hold all fields except `in_step`."""

    step: int = 0  # updates in all epochs
    epoch: int = 0  # complete epochs
    epoch_step: int = 0  # updates in this epoch
    logs: dict[str, Any] = dataclasses.field(default_factory=dict)  # this epoch's running means
    history: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # of complete epochs
    results: list[list[Any]] = dataclasses.field(default_factory=list)  # rows of results.csv
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

    def to_json(self) -> dict[str, Any]:
        """Returns a copy as plain values. Later steps do not change it."""
        values = {
            **vars(self),
            "logs": {name: float(value) for name, value in self.logs.items()},
            "history": {name: list(map(plain, v)) for name, v in self.history.items()},
            "results": list(self.results),
        }
        del values["in_step"]
        return values

    def add_step(self, logs: dict[str, Any]) -> None:
        """Counts one more update, and keeps its logs."""
        self.step += 1
        self.epoch_step += 1
        self.logs = logs
        self.in_step = False

    def end_epoch(self, row: list[Any], logs: Mapping[str, float], monitor: Monitor) -> None:
        """Counts the epoch under way as complete, after its validation.

        Among epochs of equal monitored values, the one with the lowest loss is the best, and then
        the first. The loss is val_loss with validation. An epoch is never the best if one of the
        two is not finite. A better loss alone does not postpone early stopping.

        row: the epoch's row of results.csv. logs: the means of the epoch by column.
        """
        self.epochs_since_best += 1
        if (score := monitor.score(logs)) is not None:
            if self.best is None or score[0] > self.best:
                self.epochs_since_best = 0
            known = -math.inf if self.best_loss is None else self.best_loss
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


def plain(value: Any) -> Any:
    """Converts a NumPy number, or a tensor of one number, to a Python number."""
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.item() if hasattr(value, "item") else value
