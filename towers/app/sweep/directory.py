"""A sweep's directory: what its cells have in common, and that one process works in it.

    OUT_DIR/
        sweep.json   what all cells share; models, dropouts, batches and GPU counts may be added
        sweep.csv    a row a cell; a cell that has one is not run again
        sweep.png    the picture
        cells/       a run directory a cell, such as cells/cnn-batch128-gpus2/
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from towers.resume.run_dir import write_atomically
from towers.app.config import TrainConfig

SETTINGS = "sweep.json"
TABLE = "sweep.csv"
CHART = "sweep.png"
CELLS = "cells"


@contextmanager
def opened(out_dir: Path, shared: TrainConfig) -> Iterator[None]:
    """Makes the directory of a new sweep, or goes on in that of the same; holds its lock.

    The system frees the lock when the process ends, however it ends.

    Raises:
        ValueError: another process sweeps there, it holds something else or a sweep with other
            settings, or it cannot be written.
    """
    with _explained(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out_dir, os.O_RDONLY)
    try:
        with _explained(out_dir):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _take_up(out_dir, shared)
            (out_dir / CELLS).mkdir(exist_ok=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _explained(out_dir: Path) -> Iterator[None]:
    """Turns what the operating system refuses into an error that names the argument."""
    try:
        yield
    except BlockingIOError:
        raise ValueError(
            f"out_dir ({out_dir}) is in use by another sweep. Wait for its end, or stop it."
        ) from None
    except OSError as error:
        raise ValueError(
            f"out_dir ({out_dir}) cannot be used: {error.strerror}. Name a directory that you "
            "can write to."
        ) from error


def _take_up(out_dir: Path, shared: TrainConfig) -> None:
    path, now = out_dir / SETTINGS, dataclasses.asdict(shared)
    if not path.exists():
        if any(out_dir.iterdir()):
            raise ValueError(
                f"out_dir ({out_dir}) is not empty and holds no sweep; name a new directory or "
                "an empty one."
            )
        text = json.dumps(now, indent=2) + "\n"
        write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
        return
    then = _read(path)
    differ = [name for name in now if then.get(name, getattr(TrainConfig, name)) != now[name]]
    if differ:
        listed = ", ".join(f"{n} ({then.get(n)} there, {now[n]} now)" for n in differ)
        raise ValueError(
            f"out_dir ({out_dir}) holds a sweep with other settings: {listed}. Give the same "
            "ones to go on with it, or name another directory."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); name another `out_dir`.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is damaged (no object); name another `out_dir`.")
    return values
