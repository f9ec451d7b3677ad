"""The user's Keras callbacks, told what Keras' own loop would tell them."""

from collections.abc import Sequence
from typing import Any

import keras

from towers.app import named
from towers.resume.run_dir import Result
from towers.resume.train_state import TrainState
from towers.parallel.fresh_copies import are_trusted
from towers.app.training.build import Run
from towers.app.training.listener import Listener


def load(spec: str | None) -> list[keras.callbacks.Callback]:
    """The callbacks that a user's function returns; none without one.

    Args:
        spec: "package.module:function"; the function takes no arguments.

    Raises:
        ValueError: it cannot be imported, or returns something else.
    """
    if spec is None:
        return []
    returned = named.import_function(spec, "callbacks")()
    if not isinstance(returned, list | tuple):
        raise ValueError(
            f"callbacks ({spec!r}) returned {type(returned).__name__}; it must be a list of "
            "keras.callbacks.Callback."
        )
    check(returned, f"callbacks ({spec!r}) returned")
    return list(returned)


def check(callbacks: Sequence[Any], what: str) -> None:
    """Raises ValueError where one of them is no Keras callback, or one that resumes a fit.

    Args:
        callbacks: the user's.
        what: the beginning of the sentence.
    """
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(
                f"{what} {callback!r}, which is no keras.callbacks.Callback; give instances of it."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                f"{what} a BackupAndRestore, which would replace the weights of a run. The run "
                "saves checkpoints already: leave BackupAndRestore out, and resume the run's "
                "directory."
            )


class Callbacks(Listener):
    """Keras' CallbackList, which keeps Keras' History as well.

    Callbacks may set `model.stop_training` and the learning rate, and add to the history.
    """

    phase = "a callback"

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], run: Run, train_state: TrainState
    ) -> None:
        self._callbacks, self._run, self._train_state = list(callbacks), run, train_state
        self._logs: dict[str, float] = {}
        self._hooks: Any = None
        self._are_trusted = are_trusted(self._callbacks, run.step.strategy)

    def begin(self) -> None:
        """Begins callbacks, with the history so far of a run that goes on.

        An epoch that goes on in the middle begins here, not in `begin_epoch`: the checkpoint, which
        is put in place afterwards, holds what its beginning led to, such as a learning rate.
        """
        model, train_state = self._run.step.model, self._train_state
        model.stop_training = False
        self._hooks = keras.callbacks.CallbackList(
            self._callbacks,
            add_history=True,
            model=model,
            epochs=self._run.config.epochs,
            steps=self._run.steps_an_epoch,
            verbose=0,
        )
        self._hooks.on_train_begin()
        train_state.give_history(model.history)
        if train_state.epoch_step > 0:
            self._hooks.on_epoch_begin(train_state.epoch)

    def begin_epoch(self) -> None:
        self._run.step.strategy.trust(False)
        if self._train_state.epoch_step == 0:
            self._hooks.on_epoch_begin(self._train_state.epoch)

    def begin_step(self) -> None:
        if self._callbacks:  # Keras' History alone needs no step
            self._hooks.on_train_batch_begin(self._train_state.epoch_step)

    def end_step(self) -> None:
        if self._callbacks:
            self._hooks.on_train_batch_end(self._train_state.epoch_step - 1, self._train_state.logs)
        self._run.step.strategy.trust(self._are_trusted)

    def begin_validation(self) -> None:
        """Notes whether callbacks have stopped a run that ends in mid-epoch, for its checkpoint."""
        self._run.step.strategy.trust(False)
        if self._train_state.epoch_step < self._run.steps_an_epoch:
            self._note_stop()

    def begin_test(self) -> None:
        self._hooks.on_test_begin()

    def begin_test_step(self, batch: int) -> None:
        if self._callbacks:
            self._hooks.on_test_batch_begin(batch)

    def end_test_step(self, batch: int, logs: dict[str, Any]) -> None:
        if self._callbacks:
            self._hooks.on_test_batch_end(batch, logs)
        self._run.step.strategy.trust(self._are_trusted)

    def end_test(self, logs: dict[str, float]) -> None:
        self._hooks.on_test_end(logs)

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        """Callbacks see the epoch: they may add to its history, or end the run."""
        self._logs = logs
        self._hooks.on_epoch_end(result.epoch - 1, logs)
        self._note_stop()
        self._train_state.take_history(self._run.step.model.history)

    def end(self) -> None:
        self._hooks.on_train_end(self._logs)

    def _note_stop(self) -> None:
        self._train_state.stopped = bool(self._run.step.model.stop_training)
