"""TrainState holds the step, epoch and history of a run as plain values for a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from towers.resume.best import Best, Monitor
from towers.resume.run_dir import Result


@dataclasses.dataclass
class TrainState:
    """Holds the point that a run has reached.

    step: updates in all epochs. epoch: complete epochs. epoch_step: updates in this epoch.
    logs: the running means of this epoch, {"loss": ...}.
    history: the values of the complete epochs, {"loss": [one per epoch], ...}.
    results: the rows of results.csv, as numbers.
    best: the best epoch so far. best_saved: the step whose weights best.keras holds, or None.
    stopped: whether a callback has ended the run.
    in_step: whether an update is under way, so that variables may be inconsistent. Never saved.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    logs: dict[str, Any] = dataclasses.field(default_factory=dict)
    history: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    results: list[list[float]] = dataclasses.field(default_factory=list)
    best: Best = Best()
    best_saved: int | None = None
    stopped: bool = False
    in_step: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TrainState":
        """Makes a TrainState from a result of `to_json`.

        Raises:
            TypeError: `values` has an unknown field.
        """
        best = Best(
            values.get("best"), values.get("best_step"), values.get("epochs_since_best", 0)
        )
        of_best = ("best", "best_step", "epochs_since_best")
        others = {k: v for k, v in values.items() if k not in of_best}
        return cls(**{"best_saved": best.step, **others}, best=best)

    def to_json(self) -> dict[str, Any]:
        """Returns a copy as plain values. Later steps do not change it."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "epoch_step": self.epoch_step,
            "logs": {name: float(value) for name, value in self.logs.items()},
            "history": {name: list(map(plain, v)) for name, v in self.history.items()},
            "results": list(self.results),
            "best": self.best.score,
            "best_step": self.best.step,
            "best_saved": self.best_saved,
            "epochs_since_best": self.best.epochs_since,
            "stopped": self.stopped,
        }

    def add_step(self, logs: dict[str, Any]) -> None:
        """Counts one more update, and keeps its logs."""
        self.step += 1
        self.epoch_step += 1
        self.logs = logs
        self.in_step = False

    def end_epoch(self, result: Result, logs: Mapping[str, float], monitor: Monitor) -> None:
        """Counts the epoch under way as complete, after its validation.

        Args:
            result: the epoch's row of results.csv.
            logs: the means of the epoch by column, including validation.
            monitor: the value that compares epochs.
        """
        self.best = self.best.after_epoch(logs, monitor, self.step)
        self.results.append(result.row)
        self.epoch += 1
        self.epoch_step = 0
        self.logs = {}
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
    def is_best(self) -> bool:
        """Returns whether the epoch that has just ended is the best so far."""
        return self.best.step == self.step

    def is_stopped(self, patience: int | None) -> bool:
        """Returns whether the run is over before its last step.

        Either a callback has ended the run, or `patience` epochs were not better than the best. A
        resumed run may have a larger `patience`.
        """
        return self.stopped or self.best.is_too_old(patience)


def plain(value: Any) -> Any:
    """Converts a NumPy number, or a tensor of one number, to a Python number."""
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.item() if hasattr(value, "item") else value
