"""Writes a run's results.csv, results.png, TensorBoard logs and model files."""

import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import keras
import tensorflow as tf

from towers.app.command_line import train_command
from towers.app.datasets.tf_data import cause
from towers.app.named import one_line
from towers.app.recipe.optimizer import plain_schedule
from towers.app.reporting import charts
from towers.app.reporting.augmented import draw_augmented
from towers.app.training.build import Run
from towers.machine import hang
from towers.machine.devices import HOST
from towers.machine.places import LostDirectoryError
from towers.app import run_dir
from towers.resume import checkpoints, directories
from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.resume.train_state import Logs, TrainState
from towers.step.errors import NonFiniteError
from towers.step.digests import digest, variable_digest
from towers.workers import watch

FOLDER = "tensorboard"  # in the run directory
_SECONDS_BETWEEN_CURVES = 30.0  # drawing takes up to a second
_WRITES = ("on_train_begin", "on_test_begin", "on_test_end", "on_epoch_end", "on_train_end")


class TensorBoardLog(keras.callbacks.TensorBoard):
    """Writes Keras' log of epochs; if it cannot be written any more, it warns and stops.

    An epoch that a resumed run repeats appears twice in the log, with equal values.
    """

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        super().__init__(str(directory), write_graph=False)
        self._tell: Callable[[str], None] | None = warn
        for moment in _WRITES:
            setattr(self, moment, partial(self._written, getattr(self, moment)))

    def _written(self, write: Callable[..., None], *arguments: object) -> None:
        if self._tell is None:
            return
        try:
            with hang.within(f"writing {FOLDER}"):
                write(*arguments)
        except (OSError, tf.errors.OpError) as error:
            warn, self._tell = self._tell, None
            warn(f"{self.log_dir} cannot be written any more ({cause(error)}); training continues.")


class RunFiles(keras.callbacks.Callback):
    """Writes results.csv, results.png and best.keras during training, then final.keras.

    If results.csv, results.png or best.keras cannot be written, it warns and the run continues.
    """

    def __init__(
        self, run: Run, directory: Path, train_state: TrainState, warn: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._run, self._directory, self._warn = run, directory, warn
        self._train_state, self.has_final = train_state, False  # whether final.keras is written
        self._drawn_at = time.monotonic()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Sets the files back to the run's position, because later epochs are computed again."""
        state, folder = self._train_state, self._directory / directories.CHECKPOINTS
        paths = [p for p in checkpoints.find(folder) if state.best_step == checkpoints.step_of(p)]
        if state.best_saved != state.best_step and paths:  # that epoch could not write best.keras
            self._save_best_of(paths[0])
        self._write_results()
        if self._run.config.augment:
            draw_augmented(self._run, self._directory, self._warn)

    def _save_best_of(self, path: Path) -> None:
        """Writes best.keras with the values of a checkpoint."""
        groups = {k: v for k, v in variables_of(self._run.step).items() if k != "metrics"}
        before = copy_arrays(groups)
        try:
            assign_arrays(groups, checkpoints.read(path).arrays, path)
            self._save_best()
        except checkpoints.DamagedError:
            pass  # the run's last lines say what best.keras holds
        finally:
            assign_arrays(groups, before, path)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Replaces best.keras if the epoch is the best, adds its row, and draws the curves."""
        if self._train_state.is_best:
            self._save_best()
        if self._run.config.keep_best > 1:
            self._keep_best(epoch)
        self._write_results()
        if time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN_CURVES:
            self.draw()
            self._drawn_at = time.monotonic()

    def save_final(self) -> None:
        """Writes final.keras, after Keras has read its weights back from the disk.

        It raises ValueError if that fails, and LostDirectoryError without a good best.keras.
        """
        model = self._run.step.model
        # Before its first step, a run warns about objects that Keras cannot read.
        save_model(model, self._directory / run_dir.FINAL, is_checked=not unreadable(model))
        self.has_final = True
        if self._train_state.best_saved != self._train_state.best_step:
            best = self._directory / run_dir.BEST
            raise LostDirectoryError(f"{best} does not hold the weights of the best epoch.")

    def draw(self) -> None:
        """Draws results.png; if that fails, warns and returns."""
        path = self._directory / charts.CURVES
        with charts.or_warning(path.name, self._warn):
            charts.draw_curves(path, self._columns(), self._directory.name, self._run.monitor)

    def _columns(self) -> dict[str, Sequence[float]]:
        """Returns the values of all epochs, by the name of their column in results.csv."""
        columns = [*zip(*self._train_state.results, strict=False)]  # "epoch" is the first
        return dict(zip(self._run.columns, columns[1:], strict=False))

    def _write_results(self) -> None:
        path = self._directory / run_dir.RESULTS
        try:
            with hang.within(f"writing {run_dir.RESULTS}"):
                run_dir.write_results(path, self._run.columns, self._train_state.results)
        except OSError as error:
            self._warn(f"{path} cannot be written ({error.strerror}); training continues.")

    def _save_best(self) -> None:
        if self._save(run_dir.BEST):
            self._train_state.best_saved = self._train_state.best_step

    def _keep_best(self, epoch: int) -> None:
        """Writes the model of an epoch that is among the best, and removes the others' files."""
        ranked = self._run.monitor.ranked(self._columns())[: self._run.config.keep_best]
        kept = [f"best-epoch-{index + 1}.keras" for index in ranked]
        name = f"best-epoch-{epoch + 1}.keras"
        if name in kept and not self._save(name):
            return
        # A resumed run computes later epochs again, so their files go, too.
        for path in self._directory.glob("best-epoch-*.keras"):
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _save(self, name: str) -> bool:
        """Writes the model to a file. If that fails, warns and returns False."""
        try:
            save_model(self._run.step.model, self._directory / name)
        except (NonFiniteError, LostDirectoryError) as error:
            self._warn(str(error))
            return False
        return True


def save_model(model: keras.Model, path: Path, *, is_checked: bool = False) -> None:
    """Saves a model with its optimizer; if that fails, an older file at `path` stays intact.

    is_checked: whether Keras reads the new file back before it gets its name.

    Raises:
        NonFiniteError: the model holds NaN or infinite values.
        LostDirectoryError: the file cannot be written.
        ValueError: Keras reads other weights from the file.
    """

    def write(temporary: Path) -> None:
        model.save(temporary)
        if is_checked:
            check_file(model, temporary)

    end = "."
    if path.exists():
        end = "; what it held before is intact."
    if not all(checkpoints.is_finite(weight.value.numpy()) for weight in model.weights):
        raise NonFiniteError(f"{path} is not written: the model holds NaN or infinite values{end}")
    try:
        with watch.at_work(f"writing {path}"), plain_schedule(getattr(model, "optimizer", None)):
            directories.write_atomically(path, write)
    except OSError as error:
        raise LostDirectoryError(f"{path} cannot be written ({error.strerror}){end}") from None


def check_file(model: keras.Model, path: Path) -> None:
    """Raises ValueError if Keras reads other weights from a model's file than the model has.

    If `save_own_variables` of a custom layer leaves a variable out, Keras writes and reads the file
    without an error, and the variable gets a new initial value.
    """
    try:
        with tf.device(HOST), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = keras.saving.load_model(path, compile=False)
        if digest(read) == digest(model):
            return
    except Exception as error:
        reason = one_line(error).rpartition("Exception encountered: ")[2]  # in each, the inner one
        fault = f"Keras cannot read it back: {reason[:300]}"
    else:
        differ = [
            weight.path
            for weight, found in zip(model.weights, read.weights, strict=False)
            if variable_digest(weight) != variable_digest(found)
        ]
        fault = f"Keras reads other values from it for {', '.join(differ[:3]) or 'some variables'}"
    raise ValueError(f"{run_dir.FINAL} is not written: {fault}.")


def unreadable(model: keras.Model) -> str:
    """Returns a line about objects that Keras could not load from a model's file, or "".

    If the model cannot be written to a file at all, it raises ValueError.
    """
    try:
        with warnings.catch_warnings(), plain_schedule(getattr(model, "optimizer", None)):
            warnings.simplefilter("ignore")  # Keras warns about lambdas, which are listed below
            config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except Exception as error:
        reason = " ".join(str(error).split("Please")[0].split()) or repr(error)
        raise ValueError(
            f"model ({model.name}) cannot be saved: {reason} Give its class a "
            "get_config() that returns the arguments of its __init__, and decorate it with "
            "@keras.saving.register_keras_serializable()."
        ) from None
    names = ", ".join(dict.fromkeys(_unknown(config)))
    return names and (
        f"{run_dir.BEST} and {run_dir.FINAL} cannot be read back as they are, as Keras does not "
        f"know {names}: {train_command()} --evaluate, --predict and --model would refuse them. "
        "Use a named function or class in place of a lambda, and decorate it with "
        "@keras.saving.register_keras_serializable()."
    )


def _unknown(config: object) -> Iterator[str]:
    """Yields the lambdas, and the classes and functions neither of Keras nor registered."""
    if isinstance(config, dict):
        kind, module = config.get("class_name"), config.get("module")
        if kind == "__lambda__":
            yield "a lambda"
        elif kind == "function" and module == "builtins":
            try:
                keras.saving.deserialize_keras_object(config)
            except (TypeError, ValueError):
                yield f"function {config['config']}"
        elif "registered_name" in config and not (module or "").startswith("keras"):
            if keras.saving.get_registered_object(config["registered_name"]) is None:
                yield f"class {kind}"
        config = list(config.values())
    if isinstance(config, list):
        for inner in config:
            yield from _unknown(inner)
