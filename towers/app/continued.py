"""Reads the configuration of a run that `resume` continues, and checks changes to it."""

import dataclasses
import os
from collections.abc import Collection, Container, Mapping
from typing import Any

from towers.app import run_dir
from towers.app.config import TrainConfig, fields_with
from towers.app.fields import Role, code_names
from towers.app.machine_fields import AUTO
from towers.machine import places
from towers.machine.words import printable

CODE = code_names(TrainConfig)  # the fields that may name a module to import


def resolve_config(given: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration of a new run, or of the run that `resume` continues.

    `resume` is a run's directory, or AUTO: `run_dir` if that holds a run, and a new run otherwise.
    """
    directory = given.get("resume")
    if directory == AUTO:
        if given.get("run_dir") is None:
            raise ValueError("resume=auto continues the run in `run_dir`. Set `run_dir`.")
        directory = places.as_path(given["run_dir"])
        if run_dir.read_config(directory) is None:
            directory = None
    if directory is None:
        return TrainConfig(**{**given, "resume": None})
    return continued_config(directory, given)


def continued_config(directory: str, given: Mapping[str, Any]) -> TrainConfig:
    """Returns the configuration of the run in a directory or URL, changed by the given fields."""
    directory = places.as_path(directory)
    text = run_dir.read_config(directory, "resume")
    if text is None:
        raise ValueError(
            f"resume ({directory}) holds no run that can go on: {directory}/{run_dir.CONFIG} "
            "cannot be read."
        )
    saved = TrainConfig.from_json(text)
    check_modules(saved, given, directory, "resume")
    same_place = os.path.realpath(str(given.get("run_dir"))) == os.path.realpath(directory)
    again = set(fields_with(Role.ONCE)) & set(fields_with(Role.FREE))
    if given.get("resume") == AUTO and os.path.exists(given.get("export") or ""):
        again.clear()  # the script ran before and has already exported
    changed = {k: v for k, v in given.items() if k in again or v != getattr(saved, k)}
    changed.pop("resume", None)
    if same_place:
        changed.pop("run_dir", None)
    if given.get("num_towers") == AUTO:
        changed.pop("num_towers", None)  # the run has found its number
    _check_changes(saved, changed, directory)
    place = saved.data_dir
    is_moved = place and "://" not in place and not os.path.exists(place)
    if is_moved and given.get("data_dir") is None:
        raise ValueError(
            f"data_dir ({place}) of the run in {directory} does not exist in {places.here()}. Give "
            "its new place beside `resume`: data_dir=DIR."
        )
    values = _without_leftovers(changed)
    values |= {**changed, "run_dir": directory, "resume": directory}
    return dataclasses.replace(saved, **values)


def _check_changes(saved: TrainConfig, changed: Mapping[str, Any], directory: str) -> None:
    """Raises ValueError if a run with these changes would be another one."""
    free, limit, larger = map(fields_with, (Role.FREE, Role.LIMIT, Role.LARGER))
    refused = []
    for name, value in changed.items():
        before = getattr(saved, name)
        is_larger = name in larger and None not in (before, value) and value > before
        if not (is_larger or name in free or name in limit):
            refused.append(f"{name} ({value}, the run has {before})")
    if refused:
        allowed = (", ".join(f"`{name}`" for name in names) for names in (free, limit, larger))
        raise ValueError(
            f"resume ({directory}) cannot change {', '.join(refused)}: it would be another run. "
            "Beside `resume` give only {}, other {}, or a larger {}.".format(*allowed)
        )


def _without_leftovers(changed: Container[str]) -> dict[str, Any]:
    """Returns the values of fields that a run with these changes does not take from its start."""
    values = {name: getattr(TrainConfig, name) for name in fields_with(Role.ONCE)}
    if "device" in changed:  # the saved numbers counted other devices
        values |= {"num_gpus": None, "logical_gpus": None}
    if any(name in changed for name in ("num_gpus", "logical_gpus", "device", "gpus_per_tower")):
        values["towers_per_device"] = None  # it counted the devices of then
    if "gpus_per_tower" in changed:  # the saved stages fit the old number of GPUs
        values["stages"] = None
    return values


def identity(config: TrainConfig) -> dict[str, object]:
    """Returns the fields that determine the bits of a run's results, by name."""
    skipped = fields_with(Role.FREE | Role.LIMIT | Role.LARGER | Role.ONCE)
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in skipped}


def named_modules(config: TrainConfig) -> dict[str, str]:
    """Returns the fields of a configuration that name a module to import, with their values."""
    values = {name: getattr(config, name) or "" for name in CODE}
    return {name: value for name, value in values.items() if ":" in value}


def check_modules(
    config: TrainConfig,
    given: Mapping[str, object],
    directory: str,
    argument: str,
    fields: Collection[str] = CODE,
) -> None:
    """Raises ValueError if config.json names modules, and the user neither names nor trusts them.

    fields: the names of the fields whose modules would be imported.

    A name alone can run code, wherever the module lies: importing a module executes it, and the
    named function is called.
    """
    named = named_modules(config).items()
    listed = " ".join(f"{k}={v}" for k, v in named if k in fields and k not in given)
    if listed and not given.get("trust_run_dir"):
        raise ValueError(
            f"{argument} ({directory}): its {run_dir.CONFIG} names {printable(listed)}, whose "
            "code would be executed. If you know who wrote it, add trust_run_dir=True, or give "
            "the names yourself."
        )
