"""Which epoch is the best, and when a run has waited long enough for a better one."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Best(NamedTuple):
    """The best epoch so far.

    score: see `score`; None before the first epoch that counts.
    step: the updates that were done when it ended.
    epochs_since: complete epochs after it.
    """

    score: float | None = None
    step: int | None = None
    epochs_since: int = 0

    def after_epoch(self, logs: Mapping[str, float], monitor: str, step: int) -> "Best":
        """The best epoch, now that one more is complete; of equal ones it is the first.

        An epoch whose monitored value or val_loss is not finite is never the best.

        Args:
            logs: the epoch's, validation included.
            monitor: the name of the value that is compared.
            step: the updates that are done.
        """
        value = score(logs[monitor], monitor)
        is_finite = math.isfinite(logs["val_loss"] + value)
        if is_finite and (self.score is None or value > self.score):
            return Best(value, step)
        return self._replace(epochs_since=self.epochs_since + 1)

    def is_too_old(self, patience: int | None) -> bool:
        """Whether as many epochs as `patience` have passed without a better one; None: never."""
        return patience is not None and self.epochs_since >= patience


def score(value: float, monitor: str) -> float:
    """A number that is higher for the better epoch: an accuracy itself, a loss negated."""
    return value if "accuracy" in monitor else -value


def best_index(values: Sequence[float], monitor: str) -> int | None:
    """The index of the first best value among the finite ones; None where no value is finite."""
    finite = [index for index, value in enumerate(values) if math.isfinite(value)]
    return max(finite, key=lambda index: score(values[index], monitor), default=None)
