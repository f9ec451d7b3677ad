"""When a run's state is saved: at its start, between two steps, after each epoch, at its end."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from towers.resume import run_dir
from towers.resume.checkpointer import Checkpointer
from towers.resume.run_dir import Result
from towers.resume.train_state import TrainState
from towers.app.training.build import Run
from towers.app.training.listener import Listener
from towers.app.training.loaded import build_metrics


class Autosave(Listener):
    """Puts a resumed run's state in place, and saves it from then on.

    The last of the listeners: a checkpoint holds what the others have done.
    """

    def __init__(
        self,
        run: Run,
        directory: Path,
        checkpointer: Checkpointer,
        train_state: TrainState,
        tell_stopped: Callable[[int, bool], None],
    ) -> None:
        """
        Args:
            run: what is trained.
            directory: of the run.
            checkpointer: writes and reads checkpoints in it.
            train_state: where the run stands.
            tell_stopped: called when the run ends early, with the step of the newest checkpoint,
                and whether the run stands there.
        """
        self._run, self._directory, self._checkpointer = run, directory, checkpointer
        self._train_state, self._tell_stopped = train_state, tell_stopped
        self._has_begun = False
        self._ends_in_mid_epoch = False

    def begin(self) -> None:
        """Puts what was read in place; without it, writes the checkpoint of step 0.

        Callbacks have begun before: they remember what they remembered then. Another --epochs is
        the run's own from now on.

        Raises:
            ValueError: config.json, classes.json or the first checkpoint cannot be written.
        """
        is_new = self._checkpointer.found is None
        if is_new:
            build_metrics(self._run, self._checkpointer)
        self._checkpointer.restore()
        self._checkpointer.restore_callbacks()
        self._checkpointer.forget()
        if self._run.workers.cluster.is_chief:
            self._write_files()
        if is_new:
            self._save_first()
        self._has_begun = True

    def between_steps(self) -> None:
        """Saves if it is time."""
        step = self._train_state.step
        if self._checkpointer.is_due(step, step - 1):
            self._save()

    def begin_validation(self) -> None:
        """Saves before validation replaces the sums of an epoch that is not complete.

        A run that ends in mid-epoch is saved here, for the last time: with a larger --max_steps it
        then goes on as if it had never ended.
        """
        if self._train_state.epoch_step < self._run.steps_an_epoch:
            self._save()
            self._ends_in_mid_epoch = True

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        """Saves each epoch: the best one's state is among them."""
        self._save()

    def end(self) -> None:
        """Saves before callbacks hear of the end: they may put another epoch's weights in place."""
        self._save()

    def stop(self) -> None:
        """Saves, unless an update has begun and not ended; says where the run goes on from."""
        is_consistent = self._has_begun and not self._train_state.in_step
        if is_consistent:
            self._save(is_last=True)
        is_saved = self._checkpointer.wait() and is_consistent
        step = self._checkpointer.newest_step()
        if step is not None:
            self._tell_stopped(step, is_saved)

    def _save(self, is_last: bool = False) -> None:
        if not self._ends_in_mid_epoch:
            self._checkpointer.save(self._train_state, is_last)

    def _save_first(self) -> None:
        try:
            self._checkpointer.save_first(self._train_state)
        except ValueError:
            if self._run.config.resume is None:  # there is nothing to go on with
                shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def _write_files(self) -> None:
        config = dataclasses.replace(self._run.config, resume=None)
        run_dir.write_config(self._directory, config.to_json())
        run_dir.write_class_names(self._directory, self._run.class_names)
        run_dir.remove_temporary_files(self._directory)
