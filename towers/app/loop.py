"""Runs train.py's training loop: batch, step, metrics, validation, save.

    on_train_begin
    epoch   on_epoch_begin
            batch -> step.train_batch -> on_train_batch_end, and a checkpoint if one is due
            ...
            validation: batch -> step.test_batch
            on_epoch_end, and a checkpoint
    on_train_end

The writers of the run's files are Keras callbacks, like the user's callbacks.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from towers.app.datasets.batches import ordered_batches, shuffled_batches
from towers.app.reporting.progress import ProgressLines
from towers.app.training.build import Run
from towers.app.training.loaded import put_in_place
from towers.app.training.several_workers import agreed_signal
from towers.app.training_fields import FAST_STEPS
from towers.machine import hang, callback_internals
from towers.machine.signals import Pending
from towers.parallel.fresh_copies import are_trusted
from towers.resume.checkpointer import Checkpointer
from towers.resume.source import Epoch
from towers.resume.train_state import TrainState
from towers.step.errors import NonFiniteError, values_explained
from towers.step.prefetch import prefetched
from towers.step.state import digest
from towers.workers.watch import EPOCH


class Loop:
    """Trains the remaining epochs of a run, from the position `state`, which it moves.

    `pending` holds a signal until the end of a step. `lines` and `files` write to the terminal and
    to the run's directory, before the user's `callbacks`.
    """

    def __init__(
        self,
        run: Run,
        state: TrainState,
        checkpointer: Checkpointer,
        pending: Pending,
        lines: ProgressLines,
        files: Sequence[keras.callbacks.Callback],
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        self._run, self._state, self._checkpointer = run, state, checkpointer
        self._pending, self._lines = pending, lines
        self._files, self._callbacks = list(files), list(callbacks)
        self._are_trusted = are_trusted(self._callbacks, run.step.strategy)
        self._has_begun = self._ends_in_mid_epoch = False

    def train(self) -> None:
        """Trains until all steps are done, or a callback sets `model.stop_training`."""
        run, state, model, pace = self._run, self._state, self._run.step.model, self._lines.pace
        agreed = partial(agreed_signal, run.workers, self._pending, model, state)
        logs: dict[str, float] = {}
        self._begin()
        model.stop_training = state.is_stopped(run.config.early_stopping)
        while state.epoch_step > 0 or state.step < run.num_steps and not model.stop_training:
            run.step.strategy.trust(False)
            if state.epoch_step == 0:
                self._tell("on_epoch_begin", state.epoch)
                run.step.reset_metrics()
            place: dict[str, object] = {"epoch": state.epoch, "step": state.epoch_step}
            if run.step.own_rows is not None:  # no worker sees all examples of a batch
                epoch = Epoch(run.batch_size, seed=run.config.seed, number=state.epoch)
                place["the order of the examples"] = epoch.digest(run.train.num_examples)[:16]
            run.workers.check_same(place, EPOCH)
            pace.start_epoch()
            batches = shuffled_batches(
                run.train,
                run.batch_size,
                run.config.seed,
                state.epoch,
                state.epoch_step,
                run.step.own_rows,
            )
            count = min(run.steps_an_epoch, run.num_steps - state.epoch * run.steps_an_epoch)
            # As in Keras, a stop in mid-epoch leaves only validation; before an epoch, one step.
            left = 0 if model.stop_training and state.epoch_step > 0 else count - state.epoch_step
            for _, batch in zip(range(left), prefetched(run.step, batches), strict=False):
                self._tell("on_train_batch_begin", state.epoch_step)
                state.in_step = True
                try:
                    with values_explained(f"step {state.step + 1:,}"):
                        means = run.step.train_batch(**batch._asdict())
                except NonFiniteError:  # every worker raises it
                    state.in_step = False  # no variable has changed
                    run.workers.barrier()
                    raise
                state.add_step(means)
                pace.add_step(tf.nest.flatten(batch.x)[0].shape[0])
                self._tell("on_train_batch_end", state.epoch_step - 1, means)
                signal = agreed()
                if model.stop_training:
                    break
                self._pending.obey(signal)
                is_due = self._checkpointer.is_due(state.step, state.step - 1)
                if is_due and state.epoch_step < count:
                    self._save()

            run.step.strategy.trust(False)
            logs = {name: float(value) for name, value in state.logs.items()}
            self._lines.end_steps()
            if state.epoch_step < run.steps_an_epoch:  # a larger --max_steps continues from here
                state.stopped = bool(model.stop_training)
                self._save()
                self._ends_in_mid_epoch = True
            if run.test is not None:
                values = evaluate(run, self._tell, lambda: self._pending.obey(agreed()))
                logs |= {f"val_{name}": value for name, value in values.items()}

            speed = [pace.epoch_seconds, pace.examples_per_second]
            row = [state.epoch + 1, *(logs[name] for name in run.columns), *speed, digest(model)]
            state.end_epoch(row, logs, run.monitor)
            self._tell("on_epoch_end", state.epoch - 1, logs)
            state.stopped = bool(model.stop_training)
            state.take_history(model.history)
            self._save()
            signal = agreed()
            model.stop_training = state.is_stopped(run.config.early_stopping)
            self._pending.obey(signal)
        self._save()
        # As in Keras, final.keras holds an optimizer's averages; the checkpoint holds the weights.
        callback_internals.finalize_averages(self._callbacks)
        run.step.optimizer.finalize_variable_values(model.trainable_variables)
        self._tell("on_train_end", logs)

    def stop(self) -> tuple[int, bool] | None:
        """Saves a checkpoint after an exception, unless an update had begun and not ended.

        Returns (the newest checkpoint's step, whether this is the run's step), or None without one.
        """
        is_consistent = self._has_begun and not self._state.in_step
        if is_consistent:
            self._save(is_last=True)
        is_saved = self._checkpointer.wait() and is_consistent
        step = self._checkpointer.newest_step()
        return None if step is None else (step, is_saved)

    def _begin(self) -> None:
        """Begins the callbacks, then restores them and the variables from the newest checkpoint."""
        run, state, model = self._run, self._state, self._run.step.model
        model.stop_training = False
        self._hooks = keras.callbacks.CallbackList(
            [*self._files, *self._callbacks],
            add_history=True,
            model=model,
            epochs=run.config.epochs,
            steps=run.steps_an_epoch,
            verbose=0,
        )
        self._tell("on_train_begin")
        state.give_history(model.history)
        if state.epoch_step > 0:  # the checkpoint then restores its effects, such as a rate
            self._tell("on_epoch_begin", state.epoch)
        put_in_place(run, state, self._checkpointer)
        self._has_begun = True

    def _tell(self, moment: str, *arguments: Any) -> None:
        """Calls callbacks; skips batches without user callbacks, as Keras would read back logs."""
        getattr(self._lines, moment)(*arguments)
        if self._callbacks or "_batch_" not in moment:
            with hang.within("a callback"):
                getattr(self._hooks, moment)(*arguments)
        if moment.endswith("_batch_end"):
            self._run.step.strategy.trust(self._are_trusted)

    def _save(self, is_last: bool = False) -> None:
        if not self._ends_in_mid_epoch:
            self._checkpointer.save(self._state, is_last)


def evaluate(
    run: Run,
    tell: Callable[..., None] = lambda *moment: None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Returns the test examples' {"loss": ..., "accuracy": ...}; calls `check` before batches."""
    assert run.test is not None
    tell("on_test_begin")
    run.step.reset_metrics()
    logs: dict[str, Any] = {}
    batches = ordered_batches(run.test, run.batch_size, run.step.own_rows)
    steps = range(FAST_STEPS) if run.config.fast_dev_run else itertools.count()
    for i, batch in zip(steps, prefetched(run.step, batches), strict=False):
        check()
        tell("on_test_batch_begin", i)
        with values_explained("a batch of the test examples"):
            logs = run.step.test_batch(**batch._asdict())
        run.step.strategy.trust(True)
        tell("on_test_batch_end", i, logs)
    run.step.strategy.trust(False)
    values = {name: float(value) for name, value in logs.items()}
    tell("on_test_end", values)
    return values
