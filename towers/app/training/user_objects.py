"""One's own objects in a run: a model and data that Python hands over, in place of their names."""

import dataclasses
from typing import Any, NamedTuple

import keras

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
        if self.train is not None and config.data_dir is not None:
            raise ValueError(
                f"data_dir ({config.data_dir}) has no effect beside `train`; leave it out."
            )
        if self.train is not None and config.image_size is not None:
            raise ValueError(
                f"image_size ({config.image_size}) has no effect beside `train`; leave it out."
            )
        for name, value in (("model", self.model), ("dataset", self.train)):
            _check(name, value, config)
        given = {"model": self.model, "dataset": self.train}
        names: Any = {name: PYTHON for name, value in given.items() if value is not None}
        return dataclasses.replace(config, **names)


def is_python(config: TrainConfig) -> bool:
    """Whether a run's model or data are Python's own objects, which no command line names."""
    return PYTHON in (config.model, config.dataset)


def title(config: TrainConfig, model: keras.Model) -> str:
    """The title of a run:"cnn on mnist"; of one's own objects, all that has a name."""
    name = model.name if config.model == PYTHON else config.model
    return name if config.dataset == PYTHON else f"{name} on {config.dataset}"


def _check(name: str, value: Any, config: TrainConfig) -> None:
    named, default = getattr(config, name), getattr(TrainConfig, name)
    if value is None and named == PYTHON:
        where = f"towers.TrainConfig(resume={config.resume!r})" if config.resume else "config"
        raise ValueError(
            f"{name} ({PYTHON}) is an object of the script that began the run, which no name "
            f"brings back. Call towers.train({where}, ...) there, with the same model, "
            "train and test."
        )
    if value is not None and named != PYTHON and (config.resume is not None or named != default):
        raise ValueError(
            f"{name} ({named}) is the configuration's, and an object is given beside it: give only "
            "one of them."
        )
