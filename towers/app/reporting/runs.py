"""Lists the runs of a directory for `--runs`, without TensorFlow."""

import fcntl
import json
import time
from pathlib import Path
from typing import Any

from towers.app.config import TrainConfig
from towers.machine import files
from towers.machine.words import aligned, printable
from towers.app import run_dir
from towers.resume import checkpoints, directories


def list_runs(directory: Path) -> list[str]:
    """Returns a table with a line for each run in `directory`; the newest run is the last."""
    found = []
    for config in directory.glob(f"*/{run_dir.CONFIG}"):
        newest = config.with_name(run_dir.LOG)
        if not newest.is_file():
            newest = config
        found.append((newest.lstat().st_mtime, config.parent))
    if not found:
        return [f"no run in {directory}"]
    rows = []
    for written, path in sorted(found):
        try:
            cells = _describe(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            # A stranger may have written the files.
            cells = ["", "", "", "", "unreadable"]
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
        rows.append([printable(cell) for cell in (path, *cells, when)])
    return aligned([("run", "model", "epochs", "steps", "best", "state", "last written"), *rows])


def _describe(path: Path) -> list[str]:
    """Returns a run's model, epochs, updates, best value of the monitor, and state."""
    config = TrainConfig.from_json(run_dir.read_config(path) or "")
    position: dict[str, Any] = {"epoch": 0, "step": 0}
    folder = path / directories.CHECKPOINTS
    if paths := checkpoints.find(folder):
        manifest = files.read(paths[0] / checkpoints.MANIFEST, checkpoints.LARGEST_MANIFEST)
        position = json.loads(manifest)["content"]["state"]["position"]
    best = position.get("best")
    shown = ""
    if best is not None:
        if best not in position["history"][config.monitor]:
            best = -best  # of a monitor whose lowest value is the best
        shown = f"{config.monitor} {best:.4g}"
    return [
        config.model,
        f"{position['epoch']}/{config.epochs}",
        f"{position['step']:,}",
        shown,
        _state(folder, position["step"]),
    ]


def _state(folder: Path, step: int) -> str:
    """Returns "running", "complete" or "stopped" for the folder of checkpoints."""
    try:
        with files.open_to_read(folder / directories.LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if int(files.read_text(folder / directories.COMPLETE)) == step:
            return "complete"
    except BlockingIOError:
        return "running"
    except FileNotFoundError:
        pass
    return "stopped"
