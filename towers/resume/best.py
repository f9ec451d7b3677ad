"""Finds the best epoch by a column of results.csv, and when to stop waiting for a better one."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_DEFAULTS = ("val_accuracy", "val_loss", "loss")  # the first one that is a column is used


class Monitor(NamedTuple):
    """Names a column of results.csv. Its highest or lowest value marks the best epoch."""

    column: str = "val_accuracy"
    highest: bool = True

    def score(self, value: float) -> float:
        """Returns a number that is higher for a better epoch."""
        return value if self.highest else -value

    def best_index(self, values: Sequence[float]) -> int | None:
        """Returns the index of the first best finite value, or None if no value is finite."""
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        return max(finite, key=lambda index: self.score(values[index]), default=None)


def find_monitor(
    column: str | None, mode: str, directions: Mapping[str, str | None], columns: Sequence[str]
) -> Monitor:
    """Returns the monitor for the options of a user.

    Args:
        column: a column, or None for the first of val_accuracy, val_loss and loss that exists.
        mode: "min", "max", or "auto" for the direction that Keras gives the metric.
        directions: for the loss and each metric, "up" if a higher value is better, "down" if a
            lower value is better, or None if Keras does not know.
        columns: the loss and the metrics of results.csv, and their val_ columns.

    Raises:
        ValueError: there is no such column, or Keras does not know its direction.
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


class Best(NamedTuple):
    """Describes the best epoch so far.

    score: its monitored value, negated if lower is better; None before the first finite epoch.
    step: the number of updates when it ended, or None.
    epochs_since: the number of complete epochs after it.
    """

    score: float | None = None
    step: int | None = None
    epochs_since: int = 0

    def after_epoch(self, logs: Mapping[str, float], monitor: Monitor, step: int) -> "Best":
        """Returns the best epoch after one more epoch. Among equal epochs, the first is best.

        An epoch is never the best if its monitored value or its loss is not finite. With
        validation, the loss is val_loss.

        Args:
            logs: the means of the epoch by column, including validation.
            monitor: the value that is compared.
            step: the number of updates so far.
        """
        value = monitor.score(logs[monitor.column])
        loss = logs["val_loss" if "val_loss" in logs else "loss"]
        is_finite = math.isfinite(loss + value)
        if is_finite and (self.score is None or value > self.score):
            return Best(value, step)
        return self._replace(epochs_since=self.epochs_since + 1)

    def is_too_old(self, patience: int | None) -> bool:
        """Returns whether `patience` epochs have passed without a better one. None means never."""
        return patience is not None and self.epochs_since >= patience
