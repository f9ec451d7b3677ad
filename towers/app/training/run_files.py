"""Files of a run for its user: results.csv; best.keras and final.keras, which need no towers."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from towers.resume import checkpoints, run_dir
from towers.resume.checkpoints import is_finite, step_of
from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.resume.train_state import TrainState
from towers.app.command_line import train_command
from towers.machine import hang
from towers.workers import watch
from towers.machine.places import LostDirectoryError
from towers.app.recipe.schedules import plain_schedule
from towers.step import TowerStep
from towers.step.nonfinite import NonFiniteError


class BestModel(keras.callbacks.Callback):
    """Writes best.keras after each epoch that is the best so far."""

    def __init__(
        self,
        step: TowerStep,
        directory: Path,
        train_state: TrainState,
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            step: trains the model.
            directory: of the run.
            train_state: where the run stands.
            warn: called with one line where the file cannot be written.
        """
        super().__init__()
        self._step, self._path = step, directory / run_dir.BEST
        self._checkpoints = directory / run_dir.CHECKPOINTS
        self._train_state, self._warn = train_state, warn

    def on_train_begin(self, logs: Any = None) -> None:
        """Writes the file from the best epoch's checkpoint, where it could not be written then."""
        state = self._train_state
        paths = [p for p in checkpoints.find(self._checkpoints) if state.best.step == step_of(p)]
        if state.best_saved == state.best.step or not paths:
            return
        groups = {k: v for k, v in variables_of(self._step).items() if k != "metrics"}
        before = copy_arrays(groups)
        try:
            assign_arrays(groups, checkpoints.read(paths[0]).arrays, paths[0])
            self._save()
        except checkpoints.DamagedError:
            pass  # the end of the run says what the file holds
        finally:
            assign_arrays(groups, before, self._path)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replaces the file if the epoch is the best."""
        if self._train_state.is_best:
            self._save()

    def _save(self) -> None:
        try:
            save_model(self._step.model, self._path)
            self._train_state.best_saved = self._train_state.best.step
        except (NonFiniteError, LostDirectoryError) as error:
            self._warn(str(error))


def save_model(model: keras.Model, path: Path) -> None:
    """Saves a model; where that fails, what `path` held is intact.

    Args:
        model: with its optimizer.
        path: of the file.

    Raises:
        NonFiniteError: the model holds NaN or infinite values.
        LostDirectoryError: the file cannot be written.
    """
    before = "; what it held before is intact" if path.exists() else ""
    if not all(is_finite(weight.value.numpy()) for weight in model.weights):
        raise NonFiniteError(
            f"{path} is not written: the model holds NaN or infinite values{before}."
        )
    try:
        with watch.at_work(f"writing {path}"), plain_schedule(getattr(model, "optimizer", None)):
            run_dir.write_atomically(path, model.save)
    except OSError as error:
        raise LostDirectoryError(
            f"{path} cannot be written ({error.strerror}){before}."
        ) from None


def unreadable(model: keras.Model) -> str | None:
    """One line on what of a model's file Keras could not read back; None: it reads all of it.

    Args:
        model: with its optimizer.

    Raises:
        ValueError: the file cannot be written at all.
    """
    try:
        with warnings.catch_warnings(), plain_schedule(getattr(model, "optimizer", None)):
            warnings.simplefilter("ignore")  # of lambdas, which are told below
            config = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
    except Exception as error:
        reason = " ".join(str(error).split("Please")[0].split()) or repr(error)
        raise ValueError(
            f"model ({_unwritable(model)}) cannot be saved: {reason} Give its class a "
            "get_config() that returns the arguments of its __init__, and decorate it with "
            "@keras.saving.register_keras_serializable()."
        ) from None
    names = list(dict.fromkeys(_unknown(config)))
    if not names:
        return None
    return (
        f"{run_dir.BEST} and {run_dir.FINAL} cannot be read back as they are, as Keras does not "
        f"know {', '.join(names)}: {train_command()} --evaluate, --predict and --model would "
        "refuse them. Use a named function or class in place of a lambda, and decorate it with "
        "@keras.saving.register_keras_serializable()."
    )


def _unwritable(layer: keras.Layer) -> str:
    """The name and class of the innermost layer that has no configuration."""
    for inner in getattr(layer, "layers", []):
        try:
            keras.saving.serialize_keras_object(inner)
        except Exception:
            return _unwritable(inner)
    return f"{layer.name}, a {type(layer).__name__}"


def _unknown(config: Any) -> Iterator[str]:
    """The lambdas, and the classes and functions that are neither Keras' nor registered."""
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
    if isinstance(config, dict | list):
        for inner in config.values() if isinstance(config, dict) else config:
            yield from _unknown(inner)


class ResultsFile(keras.callbacks.Callback):
    """Writes results.csv; where that fails, warns, and the run goes on."""

    def __init__(
        self,
        directory: Path,
        train_state: TrainState,
        columns: Sequence[str],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            directory: of the run.
            train_state: where the run stands.
            columns: the names of its results' values.
            warn: called with one line.
        """
        super().__init__()
        self._path = directory / run_dir.RESULTS
        self._train_state, self._columns, self._warn = train_state, columns, warn

    def on_train_begin(self, logs: Any = None) -> None:
        """Drops the rows after the checkpoint: their epochs are computed again."""
        self._write()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the epoch's row."""
        self._write()

    def _write(self) -> None:
        try:
            with hang.within(f"writing {run_dir.RESULTS}"):
                run_dir.write_results(self._path, self._columns, self._train_state.results)
        except OSError as error:
            self._warn(f"{self._path} cannot be written ({error.strerror}); training goes on.")
