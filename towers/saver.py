"""When a run saves its state, and how it takes it up again."""

import dataclasses
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from towers import checkpoints, run_dir
from towers.build import Run
from towers.checkpoints import Checkpoint
from towers.input import digest, shuffled_batches
from towers.report import Report, labelled
from towers.resume import check_identity, identity
from towers.snapshot import (
    Position,
    callbacks_arrays,
    callbacks_state,
    restore_arrays,
    restore_callbacks,
    take_arrays,
)

_COMPLETE = "complete"  # in checkpoints/: the step at which the run has ended
_SECONDS_BETWEEN_SAVES = 600.0


class Saver:
    """Where a run stands, on its way to the disk and back.

    position: where the run stands.
    is_whole: whether the variables are those of `position`: not before `begin`, nor while a step
        runs.
    """

    def __init__(
        self, run: Run, directory: Path, out: Report, callbacks: Sequence[keras.callbacks.Callback]
    ) -> None:
        self._run, self._directory, self._out = run, directory, out
        self._checkpoints = directory / run_dir.CHECKPOINTS
        self._callbacks = list(callbacks)
        self._writer = checkpoints.Writer(out.warn)
        self._loaded: tuple[Path, Checkpoint, list[str]] | None = None
        self._saved_at = time.monotonic()
        self._is_sealed = False
        self._data = {"train": digest(run.train), "test": digest(run.test)}
        self.position = Position()
        self.is_whole = False

    def load(self) -> None:
        """Reads the newest good checkpoint, without a change to anything.

        Raises:
            ValueError: it cannot continue this run: all are damaged, of other data, another model,
                another configuration.
        """
        self._loaded = checkpoints.read_newest(self._checkpoints)
        if self._loaded is None:
            if (self._directory / run_dir.RESULTS).exists():
                raise ValueError(
                    f"{self._checkpoints} holds no checkpoint, and {self._directory} holds results "
                    "that a start from step 0 would replace. Name a new directory with --run_dir."
                )
            return
        path, (state, arrays), _ = self._loaded
        try:
            check_identity(state["config"], self._run.config, path)
            self._check_data(state["data"], path)
            self.position = Position(**state["position"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no checkpoint of a run: {error!r}.") from None
        self._build_metrics()
        restore_arrays(self._run.step, arrays, path)

    @property
    def is_stopped(self) -> bool:
        """Whether a callback has ended the run, or --early_stopping, which may have grown since."""
        patience = self._run.config.early_stopping
        is_over = patience is not None and self.position.epochs_since_best >= patience
        return self.position.stopped or is_over

    def is_complete(self, steps: int) -> bool:
        """Whether the run has ended after these steps, or was stopped, with its final model."""
        if not (self._directory / run_dir.FINAL).is_file():
            return False
        try:
            ended = int((self._checkpoints / _COMPLETE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return ended == self.position.step and (self.is_stopped or ended >= steps)

    def describe(self) -> None:
        """Says what the run goes on from."""
        if self._loaded is None:
            self._out.line(labelled("Resume", "no checkpoint yet: from step 0"))
            return
        path, _, damaged = self._loaded
        for what in damaged:
            self._out.warn(f"{what}; an older one takes its place.")
        self._out.line(labelled("Resume", f"from step {self.position.step:,}: {path}"))

    def begin(self) -> None:
        """Puts the loaded state in place, or saves that of step 0; callbacks have begun before.

        Raises:
            ValueError: the first checkpoint cannot be written.
        """
        run, position = self._run, self.position
        if self._loaded is not None:
            path, (state, arrays), _ = self._loaded
            restore_arrays(run.step, arrays, path)
            restore_callbacks(self._callbacks, state.get("callbacks", []), arrays)
            run.step.model.history.epoch = list(range(position.epoch))
            run.step.model.history.history = position.to_json()["history"]
        else:
            self._build_metrics()
        run.step.model.stop_training = self.is_stopped
        self._write_results()
        self._write_config()
        for path in self._directory.glob(".*.tmp*"):  # of a process that was killed
            path.unlink(missing_ok=True)
        if self._loaded is None:
            self.save()
            if not self._writer.wait():
                raise ValueError(f"--run_dir ({self._directory}): no checkpoint can be written.")
        self._loaded = None
        self.is_whole = True

    def save_if_due(self) -> None:
        """Between two steps of an epoch."""
        every = self._run.config.checkpoint_every
        if every is None:
            is_due = time.monotonic() - self._saved_at >= _SECONDS_BETWEEN_SAVES
        else:
            is_due = self.position.step % every == 0
        if is_due:
            self.save()

    def save_epoch(self) -> None:
        """After an epoch, its validation and its callbacks: the best one's state is among them."""
        self.save()

    def save(self) -> None:
        """Copies the state, and begins to write it."""
        if self._is_sealed:
            return
        position = self.position
        arrays = {**take_arrays(self._run.step), **callbacks_arrays(self._callbacks)}
        state: dict[str, Any] = {
            "position": position.to_json(),
            "config": identity(self._run.config),
            "data": self._data,
            "callbacks": callbacks_state(self._callbacks),
        }
        path = checkpoints.path_of(self._checkpoints, position.epoch, position.step)
        self._writer.write(path, Checkpoint(state, arrays), position.best_step)
        self._saved_at = time.monotonic()

    def begin_validation(self, *, is_partial: bool) -> None:
        """Before validation replaces the epoch's sums, which a complete epoch needs no more.

        A run that ends in mid-epoch is saved here, for the last time: a larger --max_steps then
        goes on as if it had never ended.
        """
        if is_partial:
            self.position.stopped = bool(self._run.step.model.stop_training)
            self.save()
            self._is_sealed = True

    def end_epoch(self, logs: dict[str, float], row: Sequence[float]) -> bool:
        """The epoch is complete; whether it is the best so far."""
        position, monitor = self.position, self._run.config.monitor
        value = logs[monitor] if "accuracy" in monitor else -logs[monitor]
        best = position.best
        is_best = (best is None or value > best) and math.isfinite(logs["val_loss"] + value)
        position.epochs_since_best += 1
        if is_best:
            position.best, position.best_step, position.epochs_since_best = value, position.step, 0
        position.results.append(list(row))
        position.end_epoch(logs)
        return is_best

    def end_callbacks(self) -> None:
        """Callbacks have seen the epoch: they may have added to its history, or ended the run."""
        model = self._run.step.model
        self.position.stopped = bool(model.stop_training)
        model.stop_training = self.is_stopped
        self.position.history = {k: list(v) for k, v in model.history.history.items()}

    def stop(self) -> None:
        """Saves, if the state is whole, before the run ends early; says how to go on."""
        if self.is_whole:
            self.save()
        is_saved = self._writer.wait() and self.is_whole
        newest = next(iter(checkpoints.find(self._checkpoints)), None)
        if newest is not None:
            what = "saved at" if is_saved else "the last checkpoint is that of"
            command = f"python train.py --resume={shlex.quote(str(self._directory))}"
            self._out.line(f"{what} step {checkpoints.step_of(newest)}. Resume: {command}")

    def finish(self) -> None:
        """The final model is written."""
        self._writer.wait()
        text = f"{self.position.step}\n"
        try:
            run_dir.write_atomically(
                self._checkpoints / _COMPLETE, lambda file: file.write_text(text, encoding="utf-8")
            )
        except OSError as error:
            self._out.warn(f"{self._checkpoints} cannot be written ({error.strerror}).")

    def close(self) -> None:
        """Waits until nothing is being written."""
        self._writer.wait()

    def _build_metrics(self) -> None:
        x, y = shuffled_batches(self._run.train, self._run.batch_size, 0, 0).element_spec
        self._run.step.build_metrics("train", x, y)

    def _check_data(self, saved: dict[str, str], path: Path) -> None:
        for split, value in self._data.items():
            if saved[split] != value:
                raise ValueError(
                    f"the {split} data are not those that {path} was trained on: their digest has "
                    "changed. Restore the data, or start a new run."
                )

    def _write_results(self) -> None:
        """Drops the rows after the checkpoint: their epochs are computed again."""
        path = self._directory / run_dir.RESULTS
        try:
            rows = [run_dir.Result(int(row[0]), *row[1:]) for row in self.position.results]
            run_dir.write_results(path, rows)
        except OSError as error:
            self._out.warn(f"{path} cannot be written ({error.strerror}); training goes on.")

    def _write_config(self) -> None:
        """A larger --epochs is the run's own from now on."""
        config = dataclasses.replace(self._run.config, resume=None)
        run_dir.write_config(self._directory, config.to_json())
