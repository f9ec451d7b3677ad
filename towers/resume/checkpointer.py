"""Saves and restores checkpoints, for train.py and for `fit` with towers.Resume.

    chief           read the newest checkpoint --> tell --> restore     save ... save ... save
    other workers                               receive --> restore     (the state of the chief)

Only the chief uses the disk, because other workers may not see it. After each step, all workers
have the same state.
"""

import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import keras
import numpy as np

from towers.machine import callback_internals, files, hang
from towers.machine.places import LostDirectoryError
from towers.resume import checkpoints, directories
from towers.resume.checkpoints import Checkpoint, Found
from towers.resume.remote_dir import Mirror
from towers.resume.snapshot import (
    OPTIONS,
    assign_arrays,
    callbacks_arrays,
    callbacks_state,
    copy_arrays,
    restore_callbacks,
    stops_again,
    watch_callbacks,
)
from towers.resume.train_state import TrainState
from towers.resume.unsaved import Watched
from towers.workers import watch
from towers.workers.workers import Workers

SECONDS_BETWEEN_SAVES = 600.0
ARITHMETIC = "arithmetic"  # in a checkpoint's state; towers once computed each shard by itself
_WRITING = "writing a checkpoint"

Variables = Mapping[str, Sequence[keras.Variable]]  # keyed by group, such as "model", "optimizer"


class Checkpointer:
    """Reads and writes the checkpoints of a directory, in checkpoints/."""

    def __init__(
        self,
        directory: Path,
        workers: Workers,
        warn: Callable[[str], None],
        *,
        every: int | None = None,
        keep: int = checkpoints.NEWEST_KEPT,
        argument: str = "run_dir",
        mirror: Mirror | None = None,
    ) -> None:
        """
        warn: called with one line if something cannot be written.
        every: the number of updates between checkpoints. None saves about every 10 minutes.
        keep: the number of newest checkpoints that are not removed.
        argument: the user's name for the directory, for errors.
        mirror: uploads the directory if it is the local copy of a remote one.
        """
        self.directory, self._checkpoints = directory, directory / directories.CHECKPOINTS
        self._workers, self._is_chief = workers, workers.is_chief
        self.warn, self._every, self._argument, self._keep = warn, every, argument, keep
        self._mirror = mirror
        self._thread: threading.Thread | None = None  # writes a checkpoint, then removes old ones
        self._fault: str | None = None
        self._saved_at = time.monotonic()
        self.found: Found | None = None  # from `read`; the caller sets None at last, to free memory
        self.finished_step: int | None = None  # the last step of an ended run with a final model
        self.hold(dict, (), {})

    def read(self, resume: bool = True, *, has_final: bool = False) -> Found | None:
        """Returns the newest good checkpoint in all workers; None if not `resume`.

        has_final: whether the chief's directory holds the final model of a run that has ended.
        """
        if self._is_chief:
            self.found = checkpoints.read_newest(self._checkpoints) if resume else None
            self.finished_step = None
            if has_final:
                with suppress(OSError, ValueError):
                    self.finished_step = int(
                        files.read_text(self._checkpoints / directories.COMPLETE)
                    )
        if self._workers.num_workers > 1:
            self._share()
        return self.found

    def _share(self) -> None:
        """Sends the checkpoint and the finished step from the chief to the other workers."""
        newest = self.found
        text = json.dumps([newest and [str(newest.path), newest.damaged], self.finished_step])
        said, self.finished_step = json.loads(self._workers.broadcast(text.encode()))
        if said is not None:
            contents = []
            for name in (checkpoints.MANIFEST, checkpoints.ARRAYS):
                with files.open_to_read(newest.path / name) if newest else io.BytesIO() as file:
                    contents.append(self._workers.broadcast(file.read()))
            if newest is None:
                path = Path(said[0])
                self.found = Found(path, checkpoints.from_bytes(path, *contents), said[1])

    @contextmanager
    def expecting(self, what: str) -> Iterator[None]:
        """Raises ValueError if code within lacks a value in the state. `what`: "a run", "a fit"."""
        try:
            yield
        except (KeyError, TypeError, AttributeError) as error:
            assert self.found is not None
            raise ValueError(f"{self.found.path} is no checkpoint of {what}: {error!r}.") from None

    def check_same(
        self,
        then: Mapping[str, object],
        now: Mapping[str, object],
        options: Mapping[str, object],
        whose: str,
        remedy: str,
    ) -> None:
        """Raises ValueError if another run or fit (`whose`) wrote the checkpoint.

        then, now: the settings that the result depends on, by name, in the checkpoint and now.
        options: the optimizer's options now, such as {"optimizer.learning_rate": 0.001}. If they
            differed, the checkpoint would bring its learning rate, but not its schedule.
        """
        assert self.found is not None
        then = {**then, **self.found.checkpoint.state[OPTIONS]}
        now = {**now, **options}
        names = {*then, *now}
        is_before = ARITHMETIC not in self.found.checkpoint.state
        if is_before:
            names.discard("batch_norm")  # its default was "average"
        differ = [name for name in sorted(names) if then.get(name) != now.get(name)]
        if any(name in options and name.endswith("learning_rate") for name in differ):
            remedy += (
                " To change a constant learning rate from the next epoch on, leave the optimizer "
                "as it was, and add a keras.callbacks.LearningRateScheduler."
            )
        if differ:
            listed = ", ".join(f"{n} ({then.get(n)} then, {now.get(n)} now)" for n in differ)
            raise ValueError(f"{self.found.path} belongs to another {whose}: {listed}. {remedy}")
        if is_before:
            self.warn(
                f"{self.found.path} was written by an earlier version of towers. Training "
                f"continues with batch_norm={now.get('batch_norm')}, and with other last bits."
            )

    def hold(
        self,
        variables: Callable[[], Variables],
        callbacks: Sequence[keras.callbacks.Callback],
        state: Mapping[str, object],
    ) -> None:
        """Sets the content of the checkpoints.

        variables: returns all variables that the next steps depend on, by group.
        state: plain values by name, or functions of the TrainState that return them.
        """
        self._variables, self._callbacks, self._state = variables, list(callbacks), dict(state)
        self._watched: list[Watched] | None = None  # the callbacks, once they have begun
        callback_internals.note_weights(self._callbacks)

    def restore(self, callbacks: bool = True) -> None:
        """Restores the variables, and the callbacks' state, from the checkpoint that was found."""
        if self.found is not None:
            state, arrays = self.found.checkpoint
            states = state.get("callbacks", [])
            if type(states) is not list or not all(type(each) is dict for each in states):
                raise ValueError(f"{self.found.path} is forged: its callbacks have no states.")
            assign_arrays(self._variables(), arrays, self.found.path)
            if callbacks:
                restore_callbacks(self._callbacks, states, arrays, self.warn)
        if callbacks and self._watched is None:
            self._watched = watch_callbacks(self._callbacks)

    def settle_stop(self, train_state: TrainState) -> None:
        """Lets a stopped run continue, unless the callbacks' saved state would stop it again."""
        assert self.found is not None
        states = self.found.checkpoint.state.get("callbacks", [])
        loss = train_state.newest_loss
        train_state.stopped &= stops_again(self._callbacks, states, loss)

    def save(self, train_state: TrainState, is_last: bool = False) -> None:
        """Copies the state and starts to write it. It waits only for the previous write.

        Unless `is_last`, raises LostDirectoryError if another process trains in the directory.
        """
        self._saved_at = time.monotonic()
        if not self._is_chief:
            return
        with callback_internals.with_weights(self._callbacks):
            arrays = {**copy_arrays(self._variables()), **callbacks_arrays(self._callbacks)}
        state = {
            **{name: v(train_state) if callable(v) else v for name, v in self._state.items()},
            "position": train_state.to_json(),
            "callbacks": callbacks_state(self._callbacks, self.warn),
            ARITHMETIC: "whole batch",
        }
        for watched in self._watched or []:
            watched.warn_once(self.warn, is_mid_epoch=train_state.epoch_step > 0)
        path = checkpoints.path_of(self._checkpoints, train_state.epoch, train_state.step)
        self.wait()
        try:  # copied, because it may hold lists that grow during training
            checkpoint = Checkpoint(checkpoints.json_copy(state), arrays)
        except ValueError as error:
            self._fault = f"{path} is not written: its state is not JSON ({error})"
        else:
            self._thread = threading.Thread(
                target=self._write, args=(path, checkpoint, train_state.best_step), daemon=True
            )
            self._thread.start()
        if self._mirror is not None and self._mirror.is_taken and not is_last:
            raise LostDirectoryError(f"another process trains in {self._mirror.url} now.")

    def _write(self, path: Path, checkpoint: Checkpoint, best_step: int | None) -> None:
        try:
            name = _not_finite(checkpoint.arrays)
            if name is not None:
                self._fault = f"{path} is not written: {name} holds NaN or infinite values"
                return
            checkpoints.write(path, checkpoint)
            checkpoints.prune(path, best_step, self._keep)
            if self._mirror is not None:
                self._mirror.upload(path, best_step, self._keep)
        except checkpoints.DamagedError as error:
            self._fault = f"{path} is not written, as it could not be read: {error}"
        except LostDirectoryError as error:
            self._fault = str(error).rstrip(".")
        except Exception as error:  # an error in a thread would not be seen
            reason = getattr(error, "strerror", None) or repr(error)
            self._fault = f"{path} cannot be written ({reason})"

    def save_first(self, train_state: TrainState) -> None:
        """Writes the first checkpoint of a run; raises ValueError if it cannot be written."""
        self.save(train_state)
        if (fault := self._wait()) is not None:
            raise ValueError(
                f"{self._argument} ({self.directory}): no checkpoint can be written: {fault}. Make "
                "room there, or name another directory."
            )

    def is_due(self, step: int, before: int) -> bool:
        """Returns whether to save after `step` updates; the previous call was for `before`."""
        if self._every is None:
            return time.monotonic() - self._saved_at >= SECONDS_BETWEEN_SAVES
        return step // self._every > before // self._every

    def wait(self) -> bool:
        """Waits for the write under way. Returns whether the last checkpoint is on the disk."""
        if (fault := self._wait()) is not None:
            self.warn(f"{fault}; training continues.")
        return fault is None

    close = wait

    def _wait(self) -> str | None:
        """Waits for the write under way. Returns the reason if it failed, else None."""
        with (
            watch.at_work(_WRITING),
            hang.within(_WRITING, is_patient=True) if self._mirror else nullcontext(),
        ):
            if self._thread is not None:
                self._thread.join()
                self._thread = None
        fault, self._fault = self._fault, None
        return fault

    def newest_step(self) -> int | None:
        """Returns the step of the newest checkpoint; None without one, or on other workers."""
        paths = checkpoints.find(self._checkpoints) if self._is_chief else []
        if paths:
            return checkpoints.step_of(paths[0])
        return None

    def finish(self, train_state: TrainState) -> None:
        """Notes on the disk that the run has ended and has its final model. Only the chief may."""
        self.wait()
        try:
            directories.write_text(
                self._checkpoints / directories.COMPLETE, f"{train_state.step}\n"
            )
        except OSError as error:
            self.warn(f"{self._checkpoints} cannot be written ({error.strerror}).")


def _not_finite(arrays: Mapping[str, np.ndarray]) -> str | None:
    """Returns the name of a variable of the model that holds NaN or infinite values, if any."""
    for name, array in arrays.items():
        if name.startswith("model/") and not checkpoints.is_finite(array):
            return name.removeprefix("model/")
    return None
