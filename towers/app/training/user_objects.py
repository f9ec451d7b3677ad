"""Checks the model, data and callbacks that a user's Python code passes to a run."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from towers.app import named
from towers.app.config import TrainConfig

PYTHON = "python"  # stands in config.json for such an object, which no name can restore


class UserObjects(NamedTuple):
    """Holds the objects passed to `towers.train`; None if the configuration names the object."""

    model: keras.Model | None = None
    train: Any = None
    test: Any = None

    def named_in(self, config: TrainConfig) -> TrainConfig:
        """Returns the configuration with "python" in place of the name of each given object.

        Raises:
            ValueError: an object has the wrong type, is given twice, or is missing.
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
    """Returns whether a run's model or data are Python objects, which no flag can name."""
    return PYTHON in (config.model, config.dataset)


def title(config: TrainConfig, model: keras.Model) -> str:
    """Returns a run's title, such as "cnn on mnist"; data passed from Python have no name."""
    name = model.name if config.model == PYTHON else config.model
    return name if config.dataset == PYTHON else f"{name} on {config.dataset}"


def load_callbacks(
    spec: str | None, given: Sequence[keras.callbacks.Callback] = ()
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that the user's function returns, followed by the given ones.

    Args:
        spec: "package.module:function", a function without arguments; None for no function.
        given: the callbacks that the user passed as objects.

    Raises:
        ValueError: the function cannot be imported, a callback is not a Keras callback, or it is a
            BackupAndRestore, which would replace the run's weights.
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
