"""A run's state, on its way to the disk and back."""

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras

from towers.checkpointing import checkpoints, relay, run_dir
from towers.checkpointing.checkpoints import Checkpoint
from towers.checkpointing.continued import check_identity, identity
from towers.checkpointing.position import Position
from towers.checkpointing.relay import Found, Heard
from towers.checkpointing.snapshot import (
    callbacks_arrays,
    callbacks_state,
    restore_arrays,
    restore_callbacks,
    take_arrays,
)
from towers.datasets.batches import digest, shuffled_batches
from towers.levels.repeatable import UNSAVED_NOISE
from towers.machine import watch
from towers.training.build import Run

_COMPLETE = "complete"  # in checkpoints/: the step at which the run has ended


class Loaded(NamedTuple):
    """A checkpoint that has been read.

    path: of the checkpoint. position: where the run stood.
    damaged: what is wrong with each newer checkpoint.
    """

    path: Path
    position: Position
    damaged: list[str]


class Saver:
    """Reads and writes a run's state; when, `autosave` decides."""

    def __init__(
        self,
        run: Run,
        directory: Path,
        callbacks: Sequence[keras.callbacks.Callback],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            run: what is saved.
            directory: of the run.
            callbacks: the user's, which remember things, too.
            warn: called with one line where something cannot be written.
        """
        self._run, self._directory, self.workers = run, directory, run.workers
        self._checkpoints = directory / run_dir.CHECKPOINTS
        self._callbacks, self._warn = list(callbacks), warn
        self._writer = checkpoints.Writer(warn)
        self._read: tuple[Path, Checkpoint] | None = None  # until `begin` puts it in place
        splits = {"train": run.train, "test": run.test}
        self.data = {name: digest(split) for name, split in splits.items() if split is not None}

    def load(self, resume: bool = True) -> Loaded | None:
        """Reads the newest good checkpoint, without a change to any file; None: there is none yet.

        Args:
            resume: False for a run that does not go on; all workers hear of it, or of the state.

        Raises:
            ValueError: it cannot continue this run: all are damaged, of other data, another model,
                another configuration.
        """
        found = self._find(resume)
        if found is None:
            return None
        path, checkpoint, damaged = found
        try:
            check_identity(checkpoint.state["config"], self._run.config, path)
            self._check_data(checkpoint.state["data"], path)
            position = Position.from_json(checkpoint.state["position"])
            self._check_columns(position, path)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no checkpoint of a run: {error!r}.") from None
        self._build_metrics()
        restore_arrays(self._run.step, checkpoint.arrays, path)
        self._read = path, checkpoint
        return Loaded(path, position, damaged)

    def _find(self, resume: bool) -> Found | None:
        """The newest good checkpoint, of a run that goes on; the other workers are told."""
        found = None
        if resume:
            newest = checkpoints.read_newest(self._checkpoints)
            found = None if newest is None else Found(*newest)
            if found is None and (self._directory / run_dir.RESULTS).exists():
                raise ValueError(
                    f"{self._checkpoints} holds no checkpoint, and {self._directory} holds results "
                    "that a start from step 0 would replace. Name a new directory with `run_dir`."
                )
        relay.tell(self.workers, Heard(found, self.finished_step()))
        return found

    def begin(self, position: Position) -> None:
        """Puts what `load` has read in place; without it, writes the checkpoint of step 0.

        Callbacks have begun before: they remember what they remembered then. Another --epochs is
        the run's own from now on.

        Raises:
            ValueError: config.json, classes.json or the first checkpoint cannot be written.
        """
        read, self._read = self._read, None  # its arrays take as much memory as the model
        if read is None:
            self._build_metrics()
        else:
            path, (state, arrays) = read
            restore_arrays(self._run.step, arrays, path)
            restore_callbacks(self._callbacks, state.get("callbacks", []), arrays, self._warn)
        self._begin_files(position, is_new=read is None)

    def _begin_files(self, position: Position, *, is_new: bool) -> None:
        config = dataclasses.replace(self._run.config, resume=None)
        run_dir.write_config(self._directory, config.to_json())
        run_dir.write_class_names(self._directory, self._run.class_names)
        run_dir.remove_temporary_files(self._directory)
        if is_new:
            self.save(position)
            with watch.at_work():
                fault = self._writer.fault()
            if fault is not None:
                if self._run.config.resume is None:  # there is nothing to go on with
                    shutil.rmtree(self._directory, ignore_errors=True)
                raise ValueError(
                    f"run_dir ({self._directory}): no checkpoint can be written: {fault}."
                )

    def save(self, position: Position) -> None:
        """Copies the state, and begins to write it."""
        arrays = {**take_arrays(self._run.step), **callbacks_arrays(self._callbacks)}
        state: dict[str, Any] = {
            "position": position.to_json(),
            "config": identity(self._run.config),
            "data": self.data,
            "callbacks": callbacks_state(self._callbacks, self._warn),
        }
        path = checkpoints.path_of(self._checkpoints, position.epoch, position.step)
        with watch.at_work():  # it may wait for the write before it
            self._writer.write(path, Checkpoint(state, arrays), position.best.step)

    def wait(self) -> bool:
        """Waits until nothing is being written; whether the last checkpoint is on the disk."""
        with watch.at_work():
            return self._writer.wait()

    def newest_step(self) -> int | None:
        """The updates that the newest checkpoint holds; None where there is none."""
        newest = next(iter(checkpoints.find(self._checkpoints)), None)
        return None if newest is None else checkpoints.step_of(newest)

    def finish(self, position: Position) -> None:
        """Notes that the run has ended, with its final model."""
        self.wait()
        text = f"{position.step}\n"
        try:
            run_dir.write_atomically(
                self._checkpoints / _COMPLETE, lambda file: file.write_text(text, encoding="utf-8")
            )
        except OSError as error:
            self._warn(f"{self._checkpoints} cannot be written ({error.strerror}).")

    def finished_step(self) -> int | None:
        """The step at which the run has ended; None where it has not, or has no final model."""
        if not (self._directory / run_dir.FINAL).is_file():
            return None
        try:
            return int((self._checkpoints / _COMPLETE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Waits until nothing is being written."""
        self.wait()

    def _build_metrics(self) -> None:
        """Makes the metrics' sums, which are part of the state."""
        spec = shuffled_batches(self._run.train, self._run.batch_size, 0, 0).element_spec
        batch = keras.utils.unpack_x_y_sample_weight(spec)
        self._run.step.build_metrics("train", *batch)
        if self._run.step.has_unsaved_noise:
            self._warn(UNSAVED_NOISE)

    def _check_columns(self, position: Position, path: Path) -> None:
        columns = self._run.columns
        # Beside them a row holds the epoch, its seconds and its speed.
        if any(len(row) != len(columns) + 3 for row in position.results):
            raise ValueError(
                f"{path} belongs to a run with other columns than {', '.join(columns)}: the "
                "metrics have changed. Compile the model as it was, or start a new run."
            )

    def _check_data(self, saved: dict[str, str], path: Path) -> None:
        for split in sorted({*saved, *self.data}, reverse=True):
            if saved.get(split) != self.data.get(split):
                raise ValueError(
                    f"the {split} data are not those that {path} was trained on: their digest has "
                    "changed. Restore the data, or start a new run."
                )
