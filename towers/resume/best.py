"""Which epoch is the best, by which column; when a run has waited long enough for a better one."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_DEFAULTS = ("val_accuracy", "val_loss", "loss")  # the first of them that is a column


class Monitor(NamedTuple):
    """The column of results.csv whose highest or lowest value makes an epoch the best."""

    column: str = "val_accuracy"
    highest: bool = True

    def score(self, value: float) -> float:
        """A number that is higher for the better epoch."""
        return value if self.highest else -value

    def best_index(self, values: Sequence[float]) -> int | None:
        """The index of the first best value among the finite ones; None where none is finite."""
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        return max(finite, key=lambda index: self.score(values[index]), default=None)


def find_monitor(
    column: str | None, mode: str, directions: Mapping[str, str | None], columns: Sequence[str]
) -> Monitor:
    """The monitor that a user has asked for.

    Args:
        column: None means val_accuracy; where there is no such column, val_loss, else loss.
        mode: "min", "max", or "auto": as Keras has it for the metric.
        directions: of the loss and each metric: "up" where a higher value is better, "down" where
            a lower one is, None where Keras does not know.
        columns: the loss and the metrics of results.csv, and their twins of validation.

    Raises:
        ValueError: there is no such column, or nobody knows its direction.
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
    """The best epoch so far.

    score: see `Monitor.score`; None before the first epoch that counts.
    step: the updates that were done when it ended.
    epochs_since: complete epochs after it.
    """

    score: float | None = None
    step: int | None = None
    epochs_since: int = 0

    def after_epoch(self, logs: Mapping[str, float], monitor: Monitor, step: int) -> "Best":
        """The best epoch, now that one more is complete; of equal ones it is the first.

        An epoch whose monitored value or loss (of validation, if there is any) is not finite is
        never the best.

        Args:
            logs: the epoch's, validation included.
            monitor: the value that is compared.
            step: the updates that are done.
        """
        value = monitor.score(logs[monitor.column])
        loss = logs["val_loss" if "val_loss" in logs else "loss"]
        is_finite = math.isfinite(loss + value)
        if is_finite and (self.score is None or value > self.score):
            return Best(value, step)
        return self._replace(epochs_since=self.epochs_since + 1)

    def is_too_old(self, patience: int | None) -> bool:
        """Whether as many epochs as `patience` have passed without a better one; None: never."""
        return patience is not None and self.epochs_since >= patience
