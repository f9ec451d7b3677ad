"""sweep.csv: a row for each cell, with its speed-up and its efficiency."""

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, NamedTuple, TypeAlias

from towers.resume.run_dir import Result, write_atomically
from towers.app.sweep.cells import Cell

Key: TypeAlias = tuple[str, int, int]  # label, global batch, GPU count: what no two rows share


class Row(NamedTuple):
    """One cell; None is an empty field, as everything but the first five is where a cell failed.

    model: with the dropout rate where the sweep gives one: "cnn dropout=0.25".
    batch_size: the global batch.
    per_tower_batch: the largest shard of it.
    num_gpus: devices that ran towers, logical CPU devices without GPUs.
    num_towers: towers over all of them.
    epochs: that have a row in the run's results.csv; --max_steps may end the last one early.
    accuracy, val_accuracy: of the last of them.
    seconds: of all of them, validation and the first step's tracing included.
    examples_per_second: of the training steps alone, see `mean_speed`.
    speedup: examples_per_second, divided by that of 1 GPU at the same model and global batch; None
        where that cell is missing or failed.
    efficiency: speedup / num_gpus.
    host_memory_mb, device_memory_mb: peaks in 10^6 bytes, of the process and of the fullest GPU.
    error: one line; empty where the cell is done.
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
    def key(self) -> Key:
        """The columns that no two rows share."""
        return self.model, self.batch_size, self.num_gpus


def empty_row(cell: Cell, num_towers: int | None) -> Row:
    """The row of a cell before it runs; None towers are one for each GPU."""
    towers = num_towers or cell.num_gpus
    per_tower = -(-cell.batch_size // towers)
    return Row(cell.label, cell.batch_size, per_tower, cell.num_gpus, towers)


def mean_speed(results: Sequence[Result]) -> float:
    """Examples per second over all epochs: the harmonic mean, for as many examples in each."""
    return harmonic_mean([result.examples_per_second for result in results])


def filled_row(row: Row, results: Sequence[Result], host_mb: float, device_mb: float | None) -> Row:
    """The row of a cell that is done.

    Args:
        row: the `empty_row`.
        results: the epochs, at least one.
        host_mb, device_mb: peaks in 10^6 bytes; None where there is no GPU.
    """
    return row._replace(
        epochs=len(results),
        accuracy=results[-1].values["accuracy"],
        val_accuracy=results[-1].values["val_accuracy"],
        seconds=sum(result.seconds for result in results),
        examples_per_second=mean_speed(results),
        host_memory_mb=host_mb,
        device_memory_mb=device_mb,
    )


def with_speedups(rows: Sequence[Row]) -> list[Row]:
    """The rows, speed-up and efficiency computed anew, sorted by model, batch and GPU count."""
    alone = {
        (row.model, row.batch_size): row.examples_per_second for row in rows if row.num_gpus == 1
    }
    models = list(dict.fromkeys(row.model for row in rows))
    return [
        _with_speedup(row, alone.get((row.model, row.batch_size)))
        for row in sorted(rows, key=lambda row: (models.index(row.model), *row.key[1:]))
    ]


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Replaces sweep.csv.

    Raises:
        OSError: it cannot be written.
    """

    def write(temporary: Path) -> None:
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Row._fields)
            writer.writerows([_text(value) for value in row] for row in rows)

    write_atomically(path, write)


def read_table(path: Path) -> list[Row]:
    """The rows that `write_table` wrote; none where there is no file.

    Raises:
        ValueError: it holds something else.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file)) or [[]]
    try:
        if tuple(header) != Row._fields:
            raise ValueError("other columns")
        return [_row(line) for line in lines]
    except ValueError as error:
        raise ValueError(
            f"{path} is not what a sweep wrote ({error}); name another `out_dir`."
        ) from None


def _with_speedup(row: Row, alone: float | None) -> Row:
    if not alone or row.examples_per_second is None:
        return row._replace(speedup=None, efficiency=None)
    speedup = row.examples_per_second / alone
    return row._replace(speedup=speedup, efficiency=speedup / row.num_gpus)


def _text(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is None else value


def _row(line: list[str]) -> Row:
    if len(line) != len(Row._fields):
        raise ValueError(f"a row with {len(line)} fields")
    model, *counts, error = line
    batch_size, per_tower, num_gpus, num_towers = map(int, counts[:4])
    floats = [float(text) if text else None for text in counts[5:]]
    epochs = int(counts[4]) if counts[4] else None
    cell = Row(model, batch_size, per_tower, num_gpus, num_towers, epochs)
    return Row._make([*cell[:6], *floats, error])
