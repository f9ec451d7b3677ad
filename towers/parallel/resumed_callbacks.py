"""Keras' list of callbacks, for a `fit` that is saved between its steps and goes on in one."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from towers.checkpointing.position import plain
from towers.machine.signals import Pending
from towers.parallel.resume import Resume
from towers.parallel.resumed_data import Data
from towers.parallel.resumed_state import Saved, Saver
from towers.training.autosave import SECONDS_BETWEEN_SAVES


class ResumedCallbacks(keras.callbacks.CallbackList):
    """Tells callbacks of the steps that are left, and saves after all of them have heard.

    position: where the fit stands. is_done: whether the step that has begun was done before.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        resume: Resume,
        saved: Saved,
        saver: Saver,
        data: Data,
        variables: Mapping[str, Sequence[keras.Variable]],
        pending: Pending,
        **options: Any,
    ) -> None:
        """
        Args:
            callbacks: the user's, without the Resume.
            resume: where and how often to save.
            saved: where to begin.
            saver: writes checkpoints.
            data: of the epochs.
            variables: all that the next steps depend on.
            pending: the signal that waits for the end of a step.
            options: of Keras' list.
        """
        super().__init__(list(callbacks), add_history=True, **options)
        self.position, self.is_done = saved.position, False
        self._resume, self._saved, self._saver = resume, saved, saver
        self._data, self._variables, self._pending = data, variables, pending
        self._users = list(callbacks)
        self._steps_done = saved.position.epoch_step  # of the epoch under way
        self._saved_at = time.monotonic()

    def on_train_begin(self, logs: Any = None) -> None:
        """Of a fit that goes on, callbacks forget here what they then remember again.

        Raises:
            ValueError: the first checkpoint cannot be written.
        """
        super().on_train_begin(logs)
        self._restore()
        position, history = self.position, self.model.history
        num_epochs = max(map(len, position.history.values()), default=0)
        history.epoch = list(range(position.epoch - num_epochs, position.epoch))
        history.history = {name: list(values) for name, values in position.history.items()}
        if self._saved.is_new:
            self._save({})
            fault = self._saver.fault()
            if fault is not None:
                raise ValueError(
                    f"directory ({self._resume.directory}): no checkpoint can be written: {fault}."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """In mid-epoch, the checkpoint holds what its beginning led to, such as a learning rate."""
        super().on_epoch_begin(epoch, logs)
        self._data.begin_epoch(epoch)
        if self._steps_done:
            self._restore()
            self.model.stop_training = self.position.stopped

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.is_done = batch < self._steps_done
        if not self.is_done:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Of several steps in one execution, the last."""
        if self.is_done:
            return
        super().on_train_batch_end(batch, logs)
        position, before = self.position, self.position.step
        steps = min(batch + 1, self._data.most_steps)
        position.step += steps - position.epoch_step
        position.epoch_step = steps
        position.stopped = bool(self.model.stop_training)
        if self._pending.number or self._is_due(before):
            self._save(logs)
        self._obey()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """A validation that was interrupted begins anew, after the newest checkpoint's steps."""
        super().on_test_batch_end(batch, logs)
        self._obey()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves each epoch, with what callbacks have made of it."""
        super().on_epoch_end(epoch, logs)
        position, history = self.position, self.model.history.history
        position.epoch, position.epoch_step, self._steps_done = epoch + 1, 0, 0
        position.stopped = bool(self.model.stop_training)
        position.history = {name: list(values) for name, values in history.items()}
        self._save({})
        self._obey()

    def _restore(self) -> None:
        self._saved.restore(self._variables)
        self._saved.restore_callbacks(self._users)

    def _is_due(self, step_before: int) -> bool:
        every = self._resume.every
        if every is None:
            return time.monotonic() - self._saved_at >= SECONDS_BETWEEN_SAVES
        return self.position.step // every > step_before // every

    def _save(self, logs: Mapping[str, Any]) -> None:
        values = {name: plain(value) for name, value in (logs or {}).items()}
        self.position.logs = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        self._saver.save(self.position)
        self._saved_at = time.monotonic()

    def _obey(self) -> None:
        """Ends the process, when a signal has come; says where the same script goes on."""
        if self._pending.number:
            self._saver.wait()
            step, directory = self._saver.newest_step(), self._resume.directory
            print(f"\nsaved at step {step}: the same script goes on from {directory}", flush=True)
            self._pending.obey(self._pending.number)
