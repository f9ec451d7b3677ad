"""Keras' list of callbacks, for a `fit` that is saved between its steps and goes on in one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from towers.resume.checkpointer import Checkpointer
from towers.resume.train_state import TrainState, plain
from towers.machine import callback_internals
from towers.machine.signals import Pending
from towers.resume.resumed_data import Data
from towers.workers.workers import Workers


class ResumedCallbacks(keras.callbacks.CallbackList):
    """Tells callbacks of the steps that are left, and saves after all of them have heard.

    train_state: where the fit stands. is_done: whether the step that has begun was done before.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        directory: Path,
        checkpointer: Checkpointer,
        train_state: TrainState,
        data: Data,
        pending: Pending,
        workers: Workers,
        **options: Any,
    ) -> None:
        """
        Args:
            callbacks: the user's, without the Resume.
            directory: that the user has named.
            checkpointer: writes and reads checkpoints in it.
            train_state: where to begin.
            data: of the epochs.
            pending: the signal that waits for the end of a step.
            workers: those that train together, a signal to one of which is every one's.
            options: of Keras' list.
        """
        super().__init__(list(callbacks), add_history=True, **options)
        self.train_state, self.is_done = train_state, False
        self._directory, self._checkpointer = directory, checkpointer
        self._data, self._pending, self._workers = data, pending, workers
        self._steps_done = train_state.epoch_step  # of the epoch under way

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins callbacks, then puts back what they remembered in the fit that goes on.

        Raises:
            ValueError: the first checkpoint cannot be written.
        """
        super().on_train_begin(logs)
        self._restore()
        self.train_state.give_history(self.model.history)
        if self._checkpointer.found is None:
            self._checkpointer.save_first(self.train_state)
        if self.train_state.epoch >= self.params["epochs"]:  # the checkpoint is from before this
            callback_internals.finalize_averages(self.callbacks)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an epoch; in mid-epoch, puts back what its begin led to, such as a rate."""
        super().on_epoch_begin(epoch, logs)
        self._data.begin_epoch(epoch)
        if self._steps_done:
            self._restore()
            self.model.stop_training = self.train_state.stopped
        self._checkpointer.forget()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.is_done = batch < self._steps_done
        if not self.is_done:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps of an execution, whose last is `batch`, and saves if it is time."""
        if self.is_done:
            self._obey(self._agree())
            return
        super().on_train_batch_end(batch, logs)
        state, before = self.train_state, self.train_state.step
        steps = min(batch + 1, self._data.most_steps)
        state.step += steps - state.epoch_step
        state.epoch_step = steps
        state.stopped = bool(self.model.stop_training)
        signal = self._agree()
        if signal or self._checkpointer.is_due(state.step, before):
            self._save(logs)
        self._obey(signal)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """A validation that was interrupted begins anew, after the newest checkpoint's steps."""
        super().on_test_batch_end(batch, logs)
        self._obey(self._agree())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves each epoch, with what callbacks have made of it."""
        super().on_epoch_end(epoch, logs)
        state = self.train_state
        state.epoch, state.epoch_step, self._steps_done = epoch + 1, 0, 0
        state.stopped = bool(self.model.stop_training)
        state.take_history(self.model.history)
        self._save({})
        self._obey(self._agree())

    def _restore(self) -> None:
        self._checkpointer.restore()
        self._checkpointer.restore_callbacks()

    def _save(self, logs: Mapping[str, Any]) -> None:
        values = {name: plain(value) for name, value in (logs or {}).items()}
        self.train_state.logs = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        self._checkpointer.save(self.train_state)

    def _agree(self) -> int:
        """The signal that has come to one of the workers; 0: none."""
        return self._workers.all_reduce_max(self._pending.number or 0)[0]

    def _obey(self, signal: int) -> None:
        """Ends the process, when a signal has come; says where the same script goes on."""
        if not signal:
            return
        self._checkpointer.wait()
        step = self._checkpointer.newest_step()
        if step is not None:
            print(
                f"\nsaved at step {step}: the same script goes on from {self._directory}",
                flush=True,
            )
        self._workers.barrier()
        self._pending.obey(signal)
