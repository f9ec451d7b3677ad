"""One way to save a state and to go on from it, for train.py and for `fit` with towers.Resume.

    chief           read the newest checkpoint --> tell --> restore     save ... save ... save
    other workers                                  hear --> restore     (the state is the chief's)

The chief alone touches the disk, which other workers may not see. After each step all workers have
the same state.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras

from towers.resume import checkpoints, run_dir
from towers.resume.checkpoints import Checkpoint, Found
from towers.resume.optimizer_options import OPTIONS
from towers.resume.remote_dir import Mirror
from towers.resume.snapshot import (
    assign_arrays,
    callbacks_arrays,
    callbacks_state,
    copy_arrays,
    restore_callbacks,
)
from towers.resume.train_state import TrainState
from towers.machine import callback_internals, hang
from towers.machine.places import LostDirectoryError
from towers.workers import watch
from towers.workers.workers import Workers

SECONDS_BETWEEN_SAVES = 600.0
_WRITING = "writing a checkpoint"

Variables = Mapping[str, Sequence[keras.Variable]]  # by group, such as "model" and "optimizer"


class Checkpointer:
    """The checkpoints of a directory.

    directory: in which checkpoints/ is. found: what `read` has found, until `forget`.
    finished_step: where the run had ended when it was read; None where it had not, or has no final
        model.
    """

    def __init__(
        self, directory: Path, workers: Workers, warn: Callable[[str], None], *,
        every: int | None = None, argument: str = "run_dir", mirror: Mirror | None = None,
    ) -> None:
        """
        Args:
            directory: in which checkpoints/ is.
            workers: all have the same state.
            warn: called with one line where something cannot be written.
            every: updates from one checkpoint to the next; None: at least one every 10 minutes.
            argument: what the user calls the directory.
            mirror: uploads the directory, where it is the local copy of a remote one.
        """
        self.directory, self._checkpoints = directory, directory / run_dir.CHECKPOINTS
        self._workers, self._is_chief = workers, workers.cluster.is_chief
        self.warn, self._every, self._argument = warn, every, argument
        self._mirror = mirror
        self._thread: threading.Thread | None = None  # writes one checkpoint, then tidies up
        self._fault: str | None = None
        self._saved_at = time.monotonic()
        self.found: Found | None = None
        self.finished_step: int | None = None
        self.hold(dict, (), {})

    def read(self, resume: bool = True) -> Found | None:
        """Finds the newest good checkpoint, in all workers, without a change to any file.

        Args:
            resume: False for a run that does not go on.

        Raises:
            ValueError: all are damaged.
        """
        if self._is_chief:
            self.found = checkpoints.read_newest(self._checkpoints) if resume else None
            self.finished_step = self._read_finished_step()
        if self._workers.cluster.num_workers > 1:
            self._share()
        return self.found

    def forget(self) -> None:
        """Frees what has been read: it takes as much memory as the model."""
        self.found = None

    @contextmanager
    def expecting(self, what: str) -> Iterator[None]:
        """Within, what a state lacks is a ValueError that says so; `what`: "a run", "a fit"."""
        try:
            yield
        except (KeyError, TypeError, AttributeError) as error:
            assert self.found is not None
            raise ValueError(f"{self.found.path} is no checkpoint of {what}: {error!r}.") from None

    def check_identity(
        self, then: Mapping[str, Any], now: Mapping[str, Any], whose: str, way_out: str = ""
    ) -> None:
        """Raises ValueError where a checkpoint was written by another run than this one.

        Args:
            then, now: what the bits of a run depend on, by name; plain values.
            whose: what the checkpoint belongs to, if they differ: "fit".
            way_out: the end of the message.
        """
        differ = [name for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
        if differ:
            assert self.found is not None
            listed = ", ".join(f"{n} ({then.get(n)} then, {now.get(n)} now)" for n in differ)
            raise ValueError(f"{self.found.path} belongs to another {whose}: {listed}.{way_out}")

    def check_options(self, now: Mapping[str, Any], whose: str, way_out: str) -> None:
        """Raises ValueError if the script's optimizer differs from the checkpoint's.

        Without this check, the checkpoint's learning rate would replace the script's, but the
        script's schedule would replace the checkpoint's.

        Args:
            now: the options that `optimizer_options.compared` gives.
            whose: a "run" or a "fit".
            way_out: a sentence that says what to do.
        """
        assert self.found is not None
        then = self.found.checkpoint.state.get(OPTIONS, now)  # older checkpoints have none
        if any(then.get(name) != now.get(name) for name in now if name.endswith("learning_rate")):
            way_out += (
                " To change a constant learning rate from the next epoch on, leave the optimizer "
                "as it was, and add a keras.callbacks.LearningRateScheduler."
            )
        self.check_identity(then, now, whose, f" {way_out}")

    def hold(
        self,
        variables: Callable[[], Variables],
        callbacks: Sequence[keras.callbacks.Callback],
        state: Mapping[str, Any],
    ) -> None:
        """Says what the checkpoints hold.

        Args:
            variables: returns all that the next steps depend on.
            callbacks: the user's, which remember things, too.
            state: plain values, by name, or functions of the TrainState that return them: what a
                run that goes on is compared with, or needs.
        """
        self._variables, self._callbacks, self._state = variables, list(callbacks), dict(state)
        callback_internals.note_weights(self._callbacks)

    def restore(self) -> None:
        """Gives variables the values that were found, if there are any.

        Raises:
            ValueError: they are not those that were saved.
        """
        if self.found is not None:
            assign_arrays(self._variables(), self.found.checkpoint.arrays, self.found.path)

    def restore_callbacks(self) -> None:
        """Gives callbacks back what they remembered, if there is something."""
        if self.found is not None:
            state, arrays = self.found.checkpoint
            restore_callbacks(self._callbacks, state.get("callbacks", []), arrays, self.warn)

    def save(self, train_state: TrainState, is_last: bool = False) -> None:
        """Copies the state, and begins to write it; waits only for the write before it.

        Args:
            train_state: where the run stands.
            is_last: whether the run ends here, for a reason of its own.

        Raises:
            LostDirectoryError: another process trains in the remote directory.
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
        }
        path = checkpoints.path_of(self._checkpoints, train_state.epoch, train_state.step)
        self.wait()
        try:  # a copy: it may hold lists that grow while training goes on
            checkpoint = Checkpoint(checkpoints.json_copy(state), arrays)
        except ValueError as error:
            self._fault = f"{path} is not written: what it would hold is no JSON ({error})"
        else:
            self._thread = threading.Thread(
                target=self._write, args=(path, checkpoint, train_state.best.step), daemon=True
            )
            self._thread.start()
        if self._mirror is not None and self._mirror.is_taken and not is_last:
            raise LostDirectoryError(f"another process trains in {self._mirror.url} now.")

    def save_first(self, train_state: TrainState) -> None:
        """Writes the checkpoint that a run begins with.

        Raises:
            ValueError: it cannot be written.
        """
        self.save(train_state)
        fault = self._wait()
        if fault is not None:
            raise ValueError(
                f"{self._argument} ({self.directory}): no checkpoint can be written: {fault}."
            )

    def is_due(self, step: int, before: int) -> bool:
        """Whether it is time to save after `step` updates; it was asked after `before` of them."""
        if self._every is None:
            return time.monotonic() - self._saved_at >= SECONDS_BETWEEN_SAVES
        return step // self._every > before // self._every

    def wait(self) -> bool:
        """Waits until nothing is being written; whether the last checkpoint is on the disk."""
        fault = self._wait()
        if fault is not None:
            self.warn(f"{fault}; training continues.")
        return fault is None

    def close(self) -> None:
        """Waits until nothing is being written."""
        self.wait()

    def newest_step(self) -> int | None:
        """The updates that the newest checkpoint holds; None where there is none, or no disk."""
        paths = checkpoints.find(self._checkpoints) if self._is_chief else []
        return checkpoints.step_of(paths[0]) if paths else None

    def finish(self, train_state: TrainState) -> None:
        """Notes that the run has ended, with its final model."""
        if not self._is_chief:
            return
        self.wait()
        try:
            run_dir.write_text(self._checkpoints / run_dir.COMPLETE, f"{train_state.step}\n")
        except OSError as error:
            self.warn(f"{self._checkpoints} cannot be written ({error.strerror}).")

    def _wait(self) -> str | None:
        """Waits for the disk, or for a network, any time; why the last write failed."""
        with (
            watch.at_work(_WRITING),
            hang.within(_WRITING, is_patient=True) if self._mirror else nullcontext(),
        ):
            if self._thread is not None:
                self._thread.join()
                self._thread = None
        fault, self._fault = self._fault, None
        return fault

    def _write(self, path: Path, checkpoint: Checkpoint, best_step: int | None) -> None:
        try:
            name = checkpoints.first_not_finite(checkpoint.arrays)
            if name is not None:
                self._fault = f"{path} is not written: {name} holds NaN or infinite values"
                return
            checkpoints.write(path, checkpoint)
            checkpoints.prune(path.parent, path, best_step)
            if self._mirror is not None:
                self._mirror.upload(path, best_step)
        except checkpoints.DamagedError as error:
            self._fault = f"{path} is not written, as it could not be read: {error}"
        except LostDirectoryError as error:
            self._fault = str(error).rstrip(".")
        except Exception as error:  # nobody else would see it
            reason = getattr(error, "strerror", None) or repr(error)
            self._fault = f"{path} cannot be written ({reason})"

    def _read_finished_step(self) -> int | None:
        if not (self.directory / run_dir.FINAL).is_file():
            return None
        try:
            return int((self._checkpoints / run_dir.COMPLETE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _share(self) -> None:
        """Gives the other workers what the chief has read."""
        found = self.found if self._is_chief else None
        said = found and [str(found.path), found.damaged]
        text = json.dumps([said, self.finished_step]).encode()
        said, self.finished_step = json.loads(self._workers.broadcast(text))
        if said is None:
            return
        files = [
            self._workers.broadcast((found.path / name).read_bytes() if found else b"")
            for name in (checkpoints.MANIFEST, checkpoints.ARRAYS)
        ]
        if found is None:
            path = Path(said[0])
            self.found = Found(path, checkpoints.received(path, *files), said[1])
