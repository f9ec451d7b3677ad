"""A sweep's progress: a line for each cell, and on a terminal a bar while one runs."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from towers.app.sweep.cells import Cell
from towers.app.sweep.table import Row


def show(line: str) -> None:
    """Prints a line; goes on where nobody reads stdout any more."""
    try:
        print(line, flush=True)
    except (OSError, ValueError):
        # Python would fail at its exit to flush what it holds.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


class Clock:
    """Estimates the time left from the cells that this process has run."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.num_done = 0
        self._began = time.monotonic()

    def add_cell(self) -> None:
        """A cell has ended."""
        self.num_done += 1

    @property
    def left(self) -> str:
        """"0:01:40 left"; empty without an estimate, and where nothing is left."""
        if self.num_done in (0, self.num_cells):
            return ""
        seconds = (time.monotonic() - self._began) / self.num_done
        rest = timedelta(seconds=round(seconds * (self.num_cells - self.num_done)))
        return f"{rest} left"


@contextmanager
def running(cell: Cell, clock: Clock) -> Iterator[None]:
    """Shows a bar on a terminal for as long as the cell runs; in a pipe, nothing."""
    console = Console(file=sys.stdout)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    columns = (
        SpinnerColumn(),
        TextColumn("cell {task.fields[number]}/{task.total}"),
        BarColumn(bar_width=12),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(
            f"{cell.label}, batch {cell.batch_size:,} on {cell.num_gpus}",
            completed=clock.num_done,
            total=clock.num_cells,
            number=clock.num_done + 1,
            left=clock.left,
        )
        yield


def cell_line(row: Row, clock: Clock) -> str:
    """"3/8  cnn  batch 128 on 2, 64 a tower  3,912 examples/s  val_accuracy 0.953 | 0:01:40 left"

    A failed cell has its error instead of the figures.
    """
    number = f"{clock.num_done:>{len(str(clock.num_cells))}}/{clock.num_cells}"
    where = f"batch {row.batch_size:>5,} on {row.num_gpus}, {row.per_tower_batch:>5,} a tower"
    if row.error:
        figures = f"failed: {row.error}"
    else:
        figures = f"{row.examples_per_second:>8,.0f} examples/s"
        figures += f"  val_accuracy {row.val_accuracy:.3f}"
    return f"{number}  {row.model}  {where}  {figures}" + (f" | {clock.left}" if clock.left else "")
