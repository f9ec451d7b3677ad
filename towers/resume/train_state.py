"""TrainState: the step, epoch and history of a run, as plain values of a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from towers.resume.best import Best, Monitor
from towers.resume.run_dir import Result


@dataclasses.dataclass
class TrainState:
    """The point that a run has reached.

    step: updates done. epoch: complete epochs. epoch_step: updates of the epoch under way.
    logs: this epoch's running means, {"loss": ...}.
    history: of the complete epochs, {"loss": [one an epoch], ...}.
    results: the rows of results.csv.
    best: the best epoch so far. best_saved: the step whose weights best.keras holds.
    stopped: a callback has ended the run.
    in_step: an update has begun and not ended: the variables may be anything. Never saved.
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
        """The train_state that `to_json` has copied.

        Raises:
            TypeError: a field is unknown.
        """
        best = Best(
            values.get("best"), values.get("best_step"), values.get("epochs_since_best", 0)
        )
        of_best = ("best", "best_step", "epochs_since_best")
        others = {k: v for k, v in values.items() if k not in of_best}
        return cls(**{"best_saved": best.step, **others}, best=best)

    def to_json(self) -> dict[str, Any]:
        """A copy of plain values, which later steps do not change."""
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
        """One more update is done."""
        self.step += 1
        self.epoch_step += 1
        self.logs = logs
        self.in_step = False

    def end_epoch(self, result: Result, logs: Mapping[str, float], monitor: Monitor) -> None:
        """The epoch under way is complete, with its validation.

        Args:
            result: its row of results.csv.
            logs: its means, validation included.
            monitor: the value by which epochs are compared.
        """
        self.best = self.best.after_epoch(logs, monitor, self.step)
        self.results.append(result.row)
        self.epoch += 1
        self.epoch_step = 0
        self.logs = {}
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)

    def give_history(self, history: Any) -> None:
        """Gives keras.callbacks.History the complete epochs, of all processes."""
        num_epochs = max(map(len, self.history.values()), default=0)
        history.epoch = list(range(self.epoch - num_epochs, self.epoch))
        history.history = {name: list(values) for name, values in self.history.items()}

    def take_history(self, history: Any) -> None:
        """Copies what keras.callbacks.History holds."""
        self.history = {name: list(values) for name, values in history.history.items()}

    @property
    def is_best(self) -> bool:
        """Whether the epoch that has just ended is the best so far."""
        return self.best.step == self.step

    def is_stopped(self, patience: int | None) -> bool:
        """Whether the run is over before its last step.

        A callback has ended it, or there was no better epoch for as many as `patience`, which may
        have grown since.
        """
        return self.stopped or self.best.is_too_old(patience)


def plain(value: Any) -> Any:
    """NumPy's numbers, and tensors of one, as Python's."""
    value = value.numpy() if hasattr(value, "numpy") else value
    return value.item() if hasattr(value, "item") else value
