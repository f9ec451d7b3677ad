"""One's own objects in a run: a model, data and callbacks that Python hands over or imports."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from towers.app import named
from towers.app.config import TrainConfig

PYTHON = "python"  # what config.json calls them: no name brings them back


class UserObjects(NamedTuple):
    """The objects that `towers.train` is given; None: the configuration names it."""

    model: keras.Model | None = None
    train: Any = None
    test: Any = None

    def named_in(self, config: TrainConfig) -> TrainConfig:
        """The configuration, which says of each object that it came from Python.

        Raises:
            ValueError: something is given twice, or the run that goes on lacks an object.
        """
        if self.model is not None and not isinstance(self.model, keras.Model):
            raise ValueError(f"model ({self.model!r}) must be a keras.Model.")
        if self.test is not None and self.train is None:
            raise ValueError("`test` needs `train`: give the examples to train on as well.")
        for name in ("data_dir", "image_size"):
            if self.train is not None and (value := getattr(config, name)) is not None:
                raise ValueError(f"{name} ({value}) has no effect beside `train`; leave it out.")
        given = {"model": self.model, "dataset": self.train}
        for name, value in given.items():
            said, default = getattr(config, name), getattr(TrainConfig, name)
            if value is None and said == PYTHON:
                resume = f"towers.TrainConfig(resume={config.resume!r})"
                raise ValueError(
                    f"{name} ({PYTHON}) is an object of the script that began the run, which no "
                    f"name brings back. Call towers.train({resume if config.resume else 'config'}, "
                    "...) there, with the same model, train and test."
                )
            if value is not None and said != PYTHON and (config.resume or said != default):
                raise ValueError(
                    f"{name} ({said}) is the configuration's, and an object is given beside it: "
                    "give only one of them."
                )
        names: Any = {name: PYTHON for name, value in given.items() if value is not None}
        return dataclasses.replace(config, **names)


def is_python(config: TrainConfig) -> bool:
    """Whether a run's model or data are Python's own objects, which no command line names."""
    return PYTHON in (config.model, config.dataset)


def title(config: TrainConfig, model: keras.Model) -> str:
    """The title of a run:"cnn on mnist"; of one's own objects, all that has a name."""
    name = model.name if config.model == PYTHON else config.model
    return name if config.dataset == PYTHON else f"{name} on {config.dataset}"


def load_callbacks(
    spec: str | None, given: Sequence[keras.callbacks.Callback] = ()
) -> list[keras.callbacks.Callback]:
    """The callbacks that a user's function returns, then those that are given.

    Args:
        spec: "package.module:function"; the function takes no arguments. None: there is none.
        given: the user's own.

    Raises:
        ValueError: the function cannot be imported, or something is no Keras callback, or one that
            resumes a fit.
    """
    returned = [] if spec is None else named.import_function(spec, "callbacks")()
    if not isinstance(returned, list | tuple):
        raise ValueError(
            f"callbacks ({spec!r}) returned {type(returned).__name__}; it must be a list of "
            "keras.callbacks.Callback."
        )
    found = [*((f"callbacks ({spec!r}) returned", callback) for callback in returned),
             *(("callbacks hold", callback) for callback in given)]
    for begin, callback in found:
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(
                f"{begin} {callback!r}, which is no keras.callbacks.Callback; give instances of it."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                f"{begin} a BackupAndRestore, which would replace the weights of a run. The run "
                "saves checkpoints already: leave BackupAndRestore out, and resume the run's "
                "directory."
            )
    return [*returned, *given]
