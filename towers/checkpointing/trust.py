"""A run directory may be somebody else's: its config.json names modules, whose import runs them."""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from towers.checkpointing import run_dir
from towers.config import TrainConfig

_MODULE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")  # package.module:function
_PATHS = ("data_dir", "run_dir", "resume", "init_from", "export")  # whatever they look like


def check_modules(
    config: TrainConfig, given: Mapping[str, Any], directory: Path, argument: str
) -> None:
    """Refuses to import from a run's directory what nobody but its config.json names.

    It is so where the current directory is that of the run, or one inside of it.

    Args:
        config: of the run.
        given: the fields that the user has set: what they name is imported.
        directory: of the run.
        argument: that names the run, for the error.

    Raises:
        ValueError: a module would come from there, and from no entry of PYTHONPATH.
    """
    if given.get("trust_run_dir"):
        return
    for name, value in vars(config).items():
        if name in given or name in _PATHS or not isinstance(value, str):
            continue
        if _MODULE.fullmatch(value):
            for place in _places(value.split(".")[0].split(":")[0]):
                if _is_inside(place, directory):
                    raise ValueError(
                        f"{argument} ({directory}): its {run_dir.CONFIG} names {name}={value}, "
                        f"which would run {place} from the run's own directory. Go to another "
                        f"directory, or give {name}={value} yourself, or trust_run_dir=True "
                        "where you know who wrote it."
                    )


def _places(module: str) -> Iterator[Path]:
    """The file, or the folders, that a module's import would run; nothing for a built-in one."""
    named = {os.path.realpath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    if module in sys.modules:
        return
    for entry in [*sys.path, os.getcwd()]:  # as `named.import_module` looks
        found = PathFinder.find_spec(module, [entry or os.getcwd()])
        if found is None:
            continue
        if os.path.realpath(entry or os.getcwd()) not in named:
            origin = [found.origin] if found.origin else found.submodule_search_locations or []
            yield from map(Path, origin)
        return


def _is_inside(place: Path, directory: Path) -> bool:
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(directory))
