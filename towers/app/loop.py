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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.app.reporting.progress import ProgressLines
from towers.app.reporting.time_spent import CALLBACKS, CHECKPOINTS, VALIDATION
from towers.app.training.build import Run
from towers.app.training.loaded import put_in_place
from towers.app.training_fields import FAST_STEPS
from towers.machine import hang, callback_internals
from towers.parallel.fresh_copies import are_trusted
from towers.resume.after_step import AfterStep
from towers.resume.epoch import Epoch
from towers.resume.ledger import LEDGER, LedgerFile
from towers.step.errors import NonFiniteError, values_explained
from towers.divide.prefetch import prefetched
from towers.step.digests import digest
from towers.workers.watch import EPOCH


class Loop:
    """Trains the remaining epochs of a run, from the position in `after`, which it moves.

    `lines` and `files` write to the terminal and to the run's directory, before the user's
    `callbacks`.

    The law of the loop: step s ends before the batch of step s + 1 is drawn. Its update, its
    callbacks and its checkpoint come first, and so does validation at the end of an epoch.
    Validation and the checkpoint then see the weights after s updates. A run that resumes from the
    checkpoint draws the batch of step s + 1, as this run does.
    """

    def __init__(
        self,
        run: Run,
        after: AfterStep,
        lines: ProgressLines,
        files: Sequence[keras.callbacks.Callback],
        callbacks: Sequence[keras.callbacks.Callback],
    ) -> None:
        self._run, self._after, self._state = run, after, after.state
        self._lines, self._files, self._callbacks = lines, files, callbacks
        self._spent = lines.spent
        self._are_trusted = are_trusted(self._callbacks, run.step.strategy)
        self._has_begun = False
        self._ledger: LedgerFile | None = None
        if run.workers.is_chief and run.config.ledger:
            file, warn = after.checkpointer.directory / LEDGER, after.checkpointer.warn
            self._ledger = LedgerFile(file, run.step.model, run.config.ledger, warn)

    def train(self) -> None:
        """Trains until all steps are done, or a callback sets `model.stop_training`."""
        run, state, model = self._run, self._state, self._run.step.model
        logs: dict[str, float] = {}
        self._begin()
        model.stop_training = state.is_stopped(run.config.early_stopping)
        while state.epoch_step > 0 or state.step < run.num_steps and not model.stop_training:
            self._train_epoch()
            logs = self._end_epoch()
            model.stop_training = state.is_stopped(run.config.early_stopping)
        with self._spent.within(CHECKPOINTS):
            self._after.save()
        # As in Keras, final.keras holds an optimizer's averages; the checkpoint holds the weights.
        callback_internals.finalize_averages(self._callbacks)
        run.step.optimizer.finalize_variable_values(model.trainable_variables)
        self._tell("on_train_end", logs)

    def _train_epoch(self) -> None:
        """Makes the updates that are left of the epoch under way, or fewer if a callback stops."""
        run, state, model, pace = self._run, self._state, self._run.step.model, self._lines.pace
        run.step.strategy.trust(False)
        if state.epoch_step == 0:
            self._tell("on_epoch_begin", state.epoch)
            run.step.reset_metrics()
        epoch = Epoch(
            run.batch_size, run.config.seed, state.epoch, state.epoch_step, run.step.own_rows
        )
        self._check_same_place(epoch)
        pace.start_epoch()
        count = min(run.steps_an_epoch, run.num_steps - state.epoch * run.steps_an_epoch)
        # As in Keras, a stop in mid-epoch leaves only validation; before an epoch, one step.
        left = count - state.epoch_step
        if model.stop_training and state.epoch_step > 0:
            left = 0
        batches = self._spent.reading(prefetched(run.step, run.train.batches(epoch)))
        for _, batch in zip(range(left), batches, strict=False):
            self._update(batch)
            with self._spent.within(CHECKPOINTS):
                self._after.end_step(state.step - 1, saves=state.epoch_step < count)
            if model.stop_training:
                break
        run.step.strategy.trust(False)
        self._lines.end_steps()

    def _check_same_place(self, epoch: Epoch) -> None:
        """Raises ValueError if workers are at different steps, or order the examples differently."""
        run = self._run
        place: dict[str, object] = {"epoch": epoch.number, "step": epoch.start_step}
        if epoch.rows is not None:  # no worker sees all examples of a batch
            place["the order of the examples"] = epoch.digest(run.train.num_examples)[:16]
        run.workers.check_same(place, EPOCH)

    def _update(self, batch: Any) -> None:
        """Makes one update, between the callbacks' hooks, and moves the position."""
        run, state = self._run, self._state
        self._tell("on_train_batch_begin", state.epoch_step)
        state.in_step = True
        try:
            with self._spent.in_step(state.step + 1), values_explained(f"step {state.step + 1:,}"):
                means = run.step.train_batch(**batch._asdict())
        except NonFiniteError:  # every worker raises it
            state.in_step = False  # no variable has changed
            run.workers.barrier()
            raise
        state.add_step(means)
        if self._ledger is not None:
            values = batch[:-1]  # not the placed shards
            if run.step.own_rows:
                values = None
            self._ledger.add(state.epoch + 1, state.step, state.step - 1, lambda: values)
        self._lines.pace.add_step(tf.nest.flatten(batch.x)[0].shape[0])
        self._tell("on_train_batch_end", state.epoch_step - 1, means)

    def _end_epoch(self) -> dict[str, float]:
        """Validates, completes the epoch and saves; returns the epoch's means by column."""
        run, state, pace = self._run, self._state, self._lines.pace
        logs = {name: float(value) for name, value in state.logs.items()}
        if state.epoch_step < run.steps_an_epoch:  # a larger --max_steps continues from here
            with self._spent.within(CHECKPOINTS):
                self._after.save()
            self._after.is_cut = True
        if run.test is not None:
            with self._spent.within(VALIDATION):
                values = evaluate(run, self._tell, self._after.obey)
            logs |= {f"val_{name}": value for name, value in values.items()}
        speed = [pace.epoch_seconds, pace.examples_per_second]
        means = [logs[name] for name in run.columns]
        row = [state.epoch + 1, *means, *speed, digest(run.step.model)]
        state.end_epoch(row, logs, run.monitor.score(logs))
        self._tell("on_epoch_end", state.epoch - 1, logs)
        with self._spent.within(CHECKPOINTS):
            self._after.end_epoch()
        return logs

    def stop(self) -> str:
        """Saves a checkpoint after an exception, unless an update had begun and not ended.

        Returns "saved at step 1502", or a text about an earlier checkpoint; "" if there is none.
        """
        is_consistent = self._has_begun and not self._state.in_step
        if is_consistent:
            with self._spent.within(CHECKPOINTS):
                self._after.save(is_last=True)
        is_saved = self._after.checkpointer.wait() and is_consistent
        step = self._after.checkpointer.newest_step()
        if step is None:
            return ""
        if is_saved:
            return f"saved at step {step}"
        return f"the last checkpoint is from step {step}"

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
        put_in_place(run, state, self._after.checkpointer)
        self._has_begun = True

    def _tell(self, moment: str, *arguments: object) -> None:
        """Calls callbacks; skips batches without user callbacks, as Keras would read back logs."""
        getattr(self._lines, moment)(*arguments)
        if self._callbacks or "_batch_" not in moment:
            with hang.within("a callback"), self._spent.within(CALLBACKS):
                getattr(self._hooks, moment)(*arguments)
        if moment.endswith("_batch_end"):
            self._run.step.strategy.trust(self._are_trusted)


def evaluate(
    run: Run,
    tell: Callable[..., None] = lambda *moment: None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Returns the test examples' {"loss": ..., "accuracy": ...}; calls `check` before batches."""
    assert run.test is not None
    tell("on_test_begin")
    run.step.reset_metrics()
    logs: dict[str, tf.Tensor] = {}
    batches = run.test.batches(Epoch(run.batch_size, rows=run.step.own_rows))
    steps: Iterable[int] = itertools.count()
    if run.config.fast_dev_run:
        steps = range(FAST_STEPS)
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
