"""Finds a trained model's file and the run that it belongs to, without TensorFlow."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towers.resume import run_dir
from towers.app.continued import check_modules
from towers.app.config import TrainConfig, fields_with
from towers.app.fields import Role


def find_file(path: str, argument: str) -> Path:
    """Returns the .keras file itself, or the best one, else the final one, of a run's directory.

    Args:
        path: a .keras file or a run's directory.
        argument: the argument's name, for the error.

    Raises:
        ValueError: there is no such file.
    """
    file = Path(path).expanduser()
    found = [file / name for name in (run_dir.BEST, run_dir.FINAL)] if file.is_dir() else [file]
    for candidate in found:
        if candidate.is_file():
            return candidate
    raise ValueError(
        f"{argument} ({path}) is neither a .keras file nor the directory of a run with a "
        f"{run_dir.BEST}."
    )


def class_names(file: Path) -> list[str]:
    """Returns a model's class names, by label, from the run whose directory holds its file.

    Returns:
        [] if there is no run, or the run has saved no names.

    Raises:
        ValueError: the run's file holds no names.
    """
    path = file.parent / run_dir.CLASSES
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is no list of the classes' names; remove it to do without.")
    return names


def file_config(file: Path, given: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration to evaluate a file with, from the run's directory if it is in one.

    Args:
        file: the model's file.
        given: the fields that the user has set; they override the run's fields.

    Raises:
        ValueError: the run's configuration is not valid, or names code in the run's directory.
    """
    try:
        text = (file.parent / run_dir.CONFIG).read_text(encoding="utf-8")
    except OSError:
        return TrainConfig(**given)
    config = TrainConfig.from_json(text)
    check_modules(config, given, file.parent, "its run")
    values = dataclasses.asdict(config)
    if "dataset" in given:
        same = given["dataset"] == values["dataset"]
        values = {**values, "data_dir": None, "image_size": values["image_size"] if same else None}
    skipped = fields_with(Role.BEGINNING | Role.ONCE)
    brought = {name: value for name, value in values.items() if name not in skipped}
    if "batch_size_per_gpu" in given:
        brought.pop("batch_size")
    return TrainConfig(**{**brought, **given})
