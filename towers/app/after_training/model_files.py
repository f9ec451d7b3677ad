"""Finds a trained model's file and the run that it belongs to, without TensorFlow."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from towers.machine import files
from towers.app import run_dir
from towers.resume import directories
from towers.app.continued import check_modules
from towers.app.config import TrainConfig, fields_with
from towers.app.fields import Role


_LARGEST_CLASSES = 2**24  # bytes; the 21,841 names of ImageNet take a thirtieth


def find_file(path: str, argument: str) -> Path:
    """Returns the .keras file itself, or the best one, else the final one, of a run's directory."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    for candidate in (file / run_dir.BEST, file / run_dir.FINAL):
        with directories.explained(path, argument):
            files.check_link(candidate)
        if candidate.is_file():
            return candidate
    raise ValueError(
        f"{argument} ({path}) is neither a .keras file nor the directory of a run with a "
        f"{run_dir.BEST}."
    )


def class_names(file: Path) -> list[str]:
    """Returns the class names, by label, of the run in whose directory the file is; [] without."""
    path = file.parent / run_dir.CLASSES
    try:
        names = json.loads(files.read_text(path, _LARGEST_CLASSES))
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path} is no list of the classes' names; remove it to do without.")
    return names


# The fields of TrainConfig that evaluating, predicting and exporting a file depend on.
USED = frozenset(
    "model dataset data_dir image_size data_workers num_gpus logical_gpus num_towers "
    "accumulate device add_on gpus_per_tower stages batch_size batch_size_per_gpu "
    "cpu_threads worker_timeout seed trust_run_dir export".split()
)


def file_config(file: Path, given: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration to evaluate a file with, from the run's directory if it is in one.

    The fields that the user has `given` override the run's fields. If the run's configuration is
    not valid, or names code without `trust_run_dir`, it raises ValueError.
    """
    text = run_dir.read_config(file.parent, "its run")
    if text is None:
        return TrainConfig(**given)
    config = TrainConfig.from_json(text)
    check_modules(config, given, str(file.parent), "its run", USED)
    values = dataclasses.asdict(config)
    left_out = set(fields_with(Role.BEGINNING | Role.ONCE))
    if "dataset" in given:
        left_out.add("data_dir")
        if given["dataset"] != config.dataset:
            left_out.add("image_size")
    if "batch_size_per_gpu" in given:
        left_out.add("batch_size")
    return TrainConfig(**{k: v for k, v in values.items() if k not in left_out} | dict(given))
