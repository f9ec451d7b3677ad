"""What the chief has read of a run, on its way to the other workers: they may not see its disk."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from towers.checkpointing import checkpoints
from towers.checkpointing.checkpoints import Checkpoint
from towers.machine.workers import Workers


class Found(NamedTuple):
    """A checkpoint that has been read; damaged: what is wrong with each newer one."""

    path: Path
    checkpoint: Checkpoint
    damaged: list[str]


class Heard(NamedTuple):
    """What the chief knows of the run.

    found: its newest checkpoint, of a run that goes on. finished_step: where the run has ended.
    """

    found: Found | None
    finished_step: int | None


def tell(workers: Workers, heard: Heard) -> None:
    """By the chief; what it knows, to all other workers."""
    if workers.cluster.num_workers == 1:
        return
    found = heard.found
    said: dict[str, Any] = {"finished": heard.finished_step}
    if found is not None:
        said |= {"path": str(found.path), "damaged": found.damaged}
    workers.broadcast(json.dumps(said).encode())
    if found is not None:
        workers.broadcast(checkpoints.to_bytes(found.checkpoint))


def hear(workers: Workers) -> Heard:
    """By every other worker."""
    said = json.loads(workers.broadcast(b""))
    found = None
    if "path" in said:
        checkpoint = checkpoints.from_bytes(workers.broadcast(b""))
        found = Found(Path(said["path"]), checkpoint, said["damaged"])
    return Heard(found, said["finished"])
