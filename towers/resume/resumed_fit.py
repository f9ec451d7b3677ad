"""Runs `fit` with a towers.Resume: it begins at the newest checkpoint, and saves between steps.

fit(initial_epoch=e)                 e is the epoch of the newest checkpoint
    on_train_begin                   runs the callbacks, then restores their state
    on_epoch_begin                   runs the callbacks, in mid-epoch restores the variables
    steps that are done              are skipped, and callbacks are not called
    steps that are left              run, with a checkpoint from time to time
    validation, on_epoch_end         run the callbacks, then save a checkpoint
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import tensorflow as tf

from towers.machine import callback_internals, signals
from towers.machine.data_internals import split_arrays
from towers.machine.user_lines import warn_user
from towers.machine.words import counted
from towers.resume import directories, remote_dir
from towers.resume.after_step import AfterStep
from towers.resume.checkpointer import Checkpointer
from towers.resume.fit_data import FitData
from towers.resume.resume import FitOption, Resume
from towers.resume.resumed_data import Arguments
from towers.resume.snapshot import FULL_BATCH, OPTIONS, compared
from towers.resume.train_state import Logs, TrainState
from towers.step.structures import Structure
from towers.workers.workers import join_workers

_FIT = "fit"  # in a checkpoint's state: the fit's identity; train.py's checkpoints have none
_DATA = "data"  # the position in the data, and the state of random numbers

# The `initial_epoch` of the newest fit that this process has completed in each directory.
completed: dict[str, int] = {}


def fit_arguments(
    x: object = None,
    y: object = None,
    batch_size: object = None,
    epochs: object = 1,
    verbose: object = "auto",
    callbacks: object = None,
    validation_split: object = 0.0,
    validation_data: object = None,
    shuffle: object = True,
    class_weight: object = None,
    sample_weight: object = None,
    initial_epoch: object = 0,
    steps_per_epoch: object = None,
    validation_steps: object = None,
    validation_batch_size: object = None,
    validation_freq: object = 1,
) -> Arguments:
    """Returns all arguments of a call of `keras.Model.fit` by name, including the defaults."""
    return dict(locals())  # copied, because experiment trackers replace `keras.Model.fit`


def resumed_fit(
    model: keras.Model,
    fit: Callable[..., keras.callbacks.History],
    resume: Resume,
    arguments: Arguments,
    *,
    identity: Mapping[str, object],
    prepare: Callable[[Structure], Sequence[keras.Variable]],
    full_batch: tf.Variable,
) -> keras.callbacks.History:
    """Runs `fit`, and returns its history with the epochs of all processes.

    fit: Keras' `fit` of the compiled parallel model.
    arguments: all arguments of `keras.Model.fit` by name; the callbacks contain `resume`.
    identity: settings of the towers, as plain values, that must not differ in a resumed fit.
    prepare: creates all variables for a batch's specs; returns those that Keras may not list.
    full_batch: the variable in `FullBatch.sizes` for training.
    """
    callbacks = _without_options(arguments["callbacks"])
    arguments = _with_validation_data(arguments)
    with ExitStack() as stack:
        checkpointer = _open(stack, resume)
        pending = stack.enter_context(signals.deferred())
        options = stack.enter_context(compared(vars(model)))
        state, of_data = _find_position(checkpointer, resume, arguments["initial_epoch"])
        # `secrets`, because Keras and users draw from `random`.
        seed = int(join_workers().broadcast(b"%d" % secrets.randbits(31)))
        data = FitData(model, arguments, state, seed, pending, of_data)
        _check_steps_per_execution(model.steps_per_execution, state, data.num_batches)
        variables = _variables(model, prepare(data.spec))
        settings = {
            **identity,
            **data.identity,
            "steps_per_epoch": arguments["steps_per_epoch"],
            "optimizer": type(model.optimizer).__name__,
        }
        held = {
            _FIT: settings,
            OPTIONS: options,
            _DATA: lambda _: data.to_json(),
            FULL_BATCH: lambda _: int(full_batch.numpy()),
        }
        checkpointer.hold(lambda: variables, callbacks, held)
        if checkpointer.found is not None:
            saved = checkpointer.found.checkpoint.state
            remedy = "Start and compile as then, or name another directory."
            with checkpointer.expecting("a fit"):
                checkpointer.check_same(saved[_FIT], settings, options, "fit", remedy)
                full_batch.assign(saved[FULL_BATCH])
                checkpointer.settle_stop(state)
        checkpointer.restore(callbacks=False)
        stack.callback(checkpointer.wait)
        resumed = ResumedCallbacks(
            callbacks,
            str(resume.directory),
            data,
            AfterStep(model, state, checkpointer, pending, join_workers()),
            model=model,
            add_progbar=arguments["verbose"] != 0,
            verbose=arguments["verbose"],
            epochs=arguments["epochs"],
            steps=arguments["steps_per_epoch"] or data.num_batches,
        )
        history = resumed.fit(fit, arguments)
        completed[_place(resume)] = arguments["initial_epoch"]
        return history


def _without_options(callbacks: object) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that run; raises ValueError for a BackupAndRestore."""
    flat = keras.tree.flatten(callbacks)
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in flat):
        raise ValueError(
            "callbacks: towers.Resume and keras.callbacks.BackupAndRestore both restore a "
            "fit, and together they would skip steps. Remove BackupAndRestore: towers.Resume saves "
            "all that it does, and more often."
        )
    return [callback for callback in flat if not isinstance(callback, FitOption)]


def _with_validation_data(arguments: Arguments) -> Arguments:
    """Returns the arguments of `fit` with `validation_data` in place of a `validation_split`."""
    arguments = dict(arguments)
    if arguments["validation_split"] and arguments["validation_data"] is None:
        parts = arguments["x"], arguments["y"], arguments["sample_weight"]
        parts, rest = split_arrays(parts, arguments["validation_split"])
        arguments.update(zip(("x", "y", "sample_weight"), parts, strict=True))
        arguments.update(validation_split=0.0, validation_data=rest)
    return arguments


def _open(stack: ExitStack, resume: Resume) -> Checkpointer:
    """Returns the checkpoints of the directory, which `stack` keeps locked and uploads at its end.

    Only the chief does so, because other workers may not see its disk.
    """
    workers = join_workers()
    mirror = stack.enter_context(
        remote_dir.mirrored(
            str(resume.directory) if workers.is_chief else None,
            warn_user,
            resume=True,
            argument="directory",
        )
    )
    if mirror:
        directory = mirror.copy
    else:
        directory = resume.directory
    if workers.is_chief:
        stack.enter_context(directories.locked(directory, "directory"))
    return Checkpointer(
        directory, workers, warn_user, every=resume.every, argument="directory", mirror=mirror
    )


def _find_position(
    checkpointer: Checkpointer, resume: Resume, initial_epoch: int
) -> tuple[TrainState, dict[str, Any] | None]:
    """Returns where the fit begins, and what its data saved there; None for a new fit."""
    found = checkpointer.read()
    if found is None:
        return TrainState(epoch=initial_epoch), None
    for line in found.damaged:
        warn_user(line)
    saved = found.checkpoint.state
    if _FIT not in saved:
        raise ValueError(
            f"directory ({resume.directory}) holds the checkpoints of a run of train.py. "
            "Name another."
        )
    with checkpointer.expecting("a fit"):
        state = TrainState.from_json(saved["position"])
        _check_not_completed(resume, initial_epoch, state)
        return state, saved[_DATA]


def _check_steps_per_execution(steps: int, state: TrainState, num_batches: int | None) -> None:
    """Raises ValueError if Keras cannot begin an execution of so many steps at the position."""
    if state.epoch_step % steps and state.epoch_step != num_batches:
        raise ValueError(
            f"steps_per_execution ({steps}): the newest checkpoint was written after step "
            f"{state.epoch_step} of its epoch, in the middle of an execution. Give a "
            "value that divides it."
        )


def _place(resume: Resume) -> str:
    """Returns the directory or URL of a `Resume`, the same for all names of a directory."""
    directory = resume.directory
    if isinstance(directory, str):
        return directory
    return os.path.realpath(directory)


def _check_not_completed(resume: Resume, initial_epoch: int, state: TrainState) -> None:
    """Raises ValueError if this process has completed a fit in the directory.

    Another fit there, such as the next fold of a cross-validation, would get the trained weights.
    A larger `initial_epoch` says that the fit is to continue from them.
    """
    before = completed.get(_place(resume))
    if before is None or initial_epoch > before:
        return
    more = ""
    if state.epoch > before:
        more = f" To train the same model further, pass initial_epoch={state.epoch}."
    raise ValueError(
        f"directory ({resume.directory}) holds a fit that this process has completed, and this fit "
        f"would begin with its weights. Name another directory for each fit.{more}"
    )


def _variables(
    model: keras.Model, unlisted: Sequence[keras.Variable]
) -> dict[str, list[keras.Variable]]:
    """Returns all variables that the next steps depend on; each is in its first group only."""
    groups: dict[str, list[keras.Variable]] = {}
    seen: set[int] = set()
    of_optimizer = model.optimizer.variables if model.optimizer else []
    for name, variables in (
        ("model", model.variables),
        ("optimizer", of_optimizer),
        ("metrics", model.metrics_variables),
        ("step", unlisted),
    ):
        groups[name] = list({id(v): v for v in variables if id(v) not in seen}.values())
        seen.update(map(id, variables))
    return groups


class ResumedCallbacks(keras.callbacks.CallbackList):
    """Calls the callbacks for the steps that are left, and saves after all of them have run."""

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        directory: str,
        data: FitData,
        after: AfterStep,
        **options: object,
    ) -> None:
        """
        directory: the path or URL that the user gave, for messages.
        after: decides what follows a step; its state is the point where the fit begins.
        options: keyword arguments for `keras.callbacks.CallbackList`.
        """
        super().__init__(list(callbacks), add_history=True, **options)
        self._directory, self._data, self._after = directory, data, after
        self._checkpointer, self._state = after.checkpointer, after.state
        self._steps_done = after.state.epoch_step  # steps of the epoch under way

    def fit(
        self, fit: Callable[..., keras.callbacks.History], arguments: Arguments
    ) -> keras.callbacks.History:
        """Runs Keras' `fit`, which does not train again in the steps that are done."""
        model, data, state = self.model, self._data, self._state
        callback_internals.forget_initial_epoch(model)
        is_stopped = state.stopped and state.epoch_step == 0  # else, finish the epoch
        is_over = is_stopped or state.epoch >= arguments["epochs"]
        if self._checkpointer.found is not None and is_over:
            self._say_complete(is_stopped)
        if is_over:
            initial_epoch = arguments["epochs"]
        else:
            initial_epoch = data.first_epoch
        others = {"callbacks": self, "initial_epoch": initial_epoch}
        try:
            with data.running():
                return fit(**{**arguments, **data.arguments(), **others})
        except signals.StopRequested:
            self._say_saved()
            raise

    def _say_saved(self) -> None:
        """Prints where the script will resume after a signal."""
        self._checkpointer.wait()
        step = self._checkpointer.newest_step()
        if step is not None:
            text = f"\nsaved at step {step}: the same script continues from {self._directory}"
            print(text, flush=True)

    def _say_complete(self, is_stopped: bool) -> None:
        """Prints that the directory holds a complete fit, so that no step is left."""
        if join_workers().is_chief:
            early = ", stopped early" if is_stopped else ""
            print(
                f"Already complete: {counted(self._state.epoch, 'epoch')}{early}, in "
                f"{self._directory}. To train again, name another directory.",
                flush=True,
            )

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins the callbacks, then restores their state and the variables."""
        super().on_train_begin(logs)
        self._checkpointer.restore()
        self._state.give_history(self.model.history)
        if self._checkpointer.found is None:
            self._checkpointer.save_first(self._state)
        if self._state.epoch >= self.params["epochs"]:  # the checkpoint is older than this copy
            callback_internals.finalize_averages(self.callbacks)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Ends the callbacks. After a complete fit, random numbers go on as after its last step."""
        self._data.reach()
        super().on_train_end(logs)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begins an epoch. In mid-epoch, restores values that callbacks set, such as a rate."""
        self._data.at_epoch(epoch)
        if self._data.is_before:
            return
        super().on_epoch_begin(epoch, logs)
        self._data.begin_epoch()
        if self._steps_done:
            self._checkpointer.restore()
            self.model.stop_training = self._state.stopped
        self._checkpointer.found = None

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        self._data.at_step(batch)
        if not self._data.is_done:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Counts the steps of an execution that ends with `batch`, and saves if a save is due."""
        if self._data.is_done:
            self._data.end_step(batch)
            if not self._data.is_before:
                self._after.obey()
            return
        super().on_train_batch_end(batch, logs)
        state, before = self._state, self._state.step
        steps = min(batch + 1, self._data.num_batches or batch + 1)
        state.step += steps - state.epoch_step
        state.epoch_step, state.logs = steps, logs or {}
        self._after.end_step(before)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if not self._data.is_before:
            self._data.reach()  # a callback may have stopped the epoch in its first steps
            super().on_test_begin(logs)

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if not self._data.is_before:
            super().on_test_batch_begin(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Obeys a signal. The resumed fit runs the whole validation again."""
        if not self._data.is_before:
            super().on_test_batch_end(batch, logs)
            self._after.obey()

    def on_test_end(self, logs: Logs | None = None) -> None:
        if not self._data.is_before:
            super().on_test_end(logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Saves each complete epoch after its callbacks have run."""
        self._data.end_epoch()
        if self._data.is_before:
            return
        self._data.reach()
        super().on_epoch_end(epoch, logs)
        state, steps = self._state, self.params["steps"]
        # Keras ends after an epoch that a callback has stopped.
        self._after.is_cut = state.stopped and (steps is None or state.epoch_step < steps)
        if not self._after.is_cut:
            state.epoch, state.epoch_step, state.logs, self._steps_done = epoch + 1, 0, {}, 0
        self._after.end_epoch()
