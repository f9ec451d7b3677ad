"""Checks that several workers train the same run, and shares the chief's directory."""

import dataclasses
import os
from pathlib import Path

from towers.app import run_dir
from towers.app.config import fields_with
from towers.app.datasets.batches import digest
from towers.app.fields import Role
from towers.workers.cluster import Cluster
from towers.app.training.build import Run


def log_name(cluster: Cluster) -> str:
    """Returns log.txt for the chief, and log-1.txt for worker 1."""
    return run_dir.LOG if cluster.is_chief else f"log-{cluster.index}.txt"


def shared_directory(run: Run, made: Path, begun: Path = Path()) -> Path:
    """Returns the chief's directory `made`, with the same path in all workers; begins in `begun`.

    A worker that does not see the chief's disk makes a directory there for its log, and writes
    config.json into it, so that `resume` finds a run in it.
    """
    path = begun / os.fsdecode(run.workers.broadcast(os.fsencode(made)))
    if not run.workers.is_chief and not (path / run_dir.CONFIG).exists():
        path.mkdir(parents=True, exist_ok=True)
        run_dir.write_config(path, dataclasses.replace(run.config, resume=None).to_json())
    return path


def check_same(run: Run) -> dict[str, str]:
    """Raises ValueError in all workers if configuration, data or variables differ between them.

    It returns the digests of the data by split, "train" and "test".
    """
    own = fields_with(Role.LOCAL)
    config = {k: v for k, v in dataclasses.asdict(run.config).items() if k not in own}
    splits = {"train": run.train, "test": run.test}
    data = {name: digest(split) for name, split in splits.items() if split is not None}
    digests = {f"the {split} data": hexadecimal[:16] for split, hexadecimal in data.items()}
    run.workers.check_same({**config, **digests})
    run.step.check_agreement()
    return data
