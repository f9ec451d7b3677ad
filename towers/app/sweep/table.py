"""sweep.csv: a row for each cell, with its speed-up and its efficiency."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, NamedTuple

from towers.machine.places import LostDirectoryError
from towers.resume.run_dir import write_text


class Row(NamedTuple):
    """One cell. None is an empty field; a failed cell has only the first five and its error.

    model: with the dropout rate if the sweep gives one: "cnn dropout=0.25".
    batch_size: the global batch.
    per_tower_batch: the largest shard of it.
    num_gpus: devices that ran towers, logical CPU devices without GPUs.
    num_towers: towers over all of them.
    epochs: the rows of the run's results.csv; --max_steps may end the last epoch early.
    accuracy, val_accuracy: of the last epoch.
    seconds: of all epochs, validation and the first step's tracing included.
    examples_per_second: of the training steps alone, the harmonic mean over the epochs.
    speedup: examples_per_second, divided by that of 1 GPU at the same model and global batch; None
        if that cell is missing or failed.
    efficiency: speedup / num_gpus.
    host_memory_mb, device_memory_mb: empty; earlier versions measured them.
    error: one line; empty if the cell is done.
    """

    model: str
    batch_size: int
    per_tower_batch: int
    num_gpus: int
    num_towers: int
    epochs: int | None = None
    accuracy: float | None = None
    val_accuracy: float | None = None
    seconds: float | None = None
    examples_per_second: float | None = None
    speedup: float | None = None
    efficiency: float | None = None
    host_memory_mb: float | None = None
    device_memory_mb: float | None = None
    error: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        """The columns that no two rows share."""
        return self.model, self.batch_size, self.num_gpus


def filled_row(row: Row, results: Path) -> Row:
    """The row of a cell that is done, with the figures of its run's results.csv.

    Raises:
        OSError, ValueError, LookupError: it has no such figures.
    """
    with results.open(newline="", encoding="utf-8") as file:
        epochs = list(csv.DictReader(file))
    return row._replace(
        epochs=len(epochs),
        accuracy=float(epochs[-1]["accuracy"]),
        val_accuracy=float(epochs[-1]["val_accuracy"]),
        seconds=sum(float(epoch["seconds"]) for epoch in epochs),
        # All examples by all seconds, as every epoch has as many examples.
        examples_per_second=harmonic_mean(float(e["examples_per_second"]) for e in epochs),
    )


def with_speedups(rows: Iterable[Row]) -> list[Row]:
    """The rows, speed-up and efficiency computed anew, sorted by model, batch and GPU count."""
    found = []
    rows = list(rows)
    speeds = {row.key: row.examples_per_second for row in rows}
    models = list(dict.fromkeys(row.model for row in rows))
    for row in sorted(rows, key=lambda row: (models.index(row.model), *row.key[1:])):
        alone = speeds.get((row.model, row.batch_size, 1))
        speedup = row.examples_per_second and alone and row.examples_per_second / alone
        efficiency = speedup and speedup / row.num_gpus
        found.append(row._replace(speedup=speedup, efficiency=efficiency))
    return found


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Replaces sweep.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    for row in rows:  # None is written as an empty field
        writer.writerow(f"{v:.6g}" if isinstance(v, float) else v for v in row)
    try:
        write_text(path, text.getvalue())
    except OSError as error:
        raise LostDirectoryError(
            f"{path} cannot be written ({error.strerror}). Make room, then run the same command: "
            "the cells that are in it are kept."
        ) from None


def read_table(path: Path) -> list[Row]:
    """The rows that `write_table` wrote; none if there is no file.

    Raises:
        ValueError: it holds something else.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        try:
            return [
                Row(**{name: _value(name, text) for name, text in line.items()})
                for line in csv.DictReader(file)
            ]
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path} is not what a sweep wrote ({error}); name another `out_dir`."
            ) from None


def _value(name: str, text: str) -> Any:
    kind = Row.__annotations__[name]
    if kind is str:
        return text
    return None if text == "" else int(text) if kind in (int, int | None) else float(text)
