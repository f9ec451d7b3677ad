"""Monitor finds the best epoch of a run by a column of results.csv."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
        if not math.isfinite(value + loss):
            return None
        if not self.highest:
            value = -value
        return value, -loss

    def best_index(self, columns: Mapping[str, Sequence[float]]) -> int | None:
        """Returns the index of the best epoch, the first of equal ones; None if there is none."""
        return next(iter(self.ranked(columns)), None)

    def ranked(self, columns: Mapping[str, Sequence[float]]) -> list[int]:
        """Returns the indices of the epochs with finite values, from the best to the worst."""
        used = [name for name in {self.column, "loss", "val_loss"} if name in columns]
        scores = {}
        for index, epoch in enumerate(zip(*(columns[name] for name in used), strict=False)):
            score = self.score(dict(zip(used, epoch, strict=True)))
            if score is not None:
                scores[index] = score
        return sorted(scores, key=lambda index: scores[index], reverse=True)


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
    direction = directions.get(column) or directions.get(column.removeprefix("val_"))
    if direction is None:
        raise ValueError(
            f"monitor ({column!r}): Keras does not know whether its highest or its lowest value is "
            "the best. Say it with monitor_mode=max or monitor_mode=min."
        )
    return Monitor(column, direction == "up")
