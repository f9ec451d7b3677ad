"""run_sweep: every cell in a fresh process of train.py, a row for each, a picture and advice."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from towers import __version__
from towers.resume import run_dir
from towers.app.config import TrainConfig
from towers.machine.words import counted, plural
from towers.app.named import one_line
from towers.app.sweep import directory, table
from towers.app.sweep.advice import advice
from towers.app.sweep.cells import Cell, Machine, cell_name, check_cells, train_flags
from towers.app.sweep.chart import draw_sweep
from towers.app.sweep.child import MEASURED
from towers.app.sweep.progress import Clock, cell_line, running, show
from towers.app.sweep.table import Key, Row

_UNKNOWN = Machine(None, 1)  # of a sweep without a cell done


def run_sweep(
    cells: Sequence[Cell],
    shared: TrainConfig,
    out_dir: Path,
    train: Path | str = "towers",
    retry_failed: bool = False,
) -> list[Row]:
    """Runs the cells that `out_dir` has no row for; see `directory` for what it leaves there.

    Args:
        cells: from `make_cells`.
        shared: what all cells have in common.
        out_dir: new, empty, or of the same sweep.
        train: the module, or the path, of train.py.
        retry_failed: run those cells, too, whose row is an error.

    Returns:
        The rows of sweep.csv.

    Raises:
        ValueError: a value makes no sense, or `out_dir` is not this sweep's; see also `opened`.
        KeyboardInterrupt: with the cells that are done in sweep.csv; the one that ran is killed.
    """
    check_cells(cells, shared)
    with directory.opened(out_dir, shared):
        rows = {row.key: row for row in table.read_table(out_dir / directory.TABLE)}
        left = [cell for cell in cells if _is_open(rows.get(_key(cell)), retry_failed)]
        show(f"towers {'.'.join(__version__.split('.')[:2])} | sweep: {out_dir}")
        show(f"Cells     {_counted(cells, left, rows)}")
        try:
            _run_cells(left, shared, out_dir, train, rows)
        except KeyboardInterrupt:
            done = len(cells) - len([c for c in cells if _is_open(rows.get(_key(c)), False)])
            show(f"{done} of {len(cells)} cells are done. The same command goes on with the rest.")
            raise
        return _conclude(out_dir, shared, list(rows.values()))


def _run_cells(
    cells: Sequence[Cell],
    shared: TrainConfig,
    out_dir: Path,
    train: Path | str,
    rows: dict[Key, Row],
) -> None:
    """Adds a row for each cell, and writes sweep.csv after each."""
    clock = Clock(len(cells))
    for cell in cells:
        with running(cell, clock):
            row = run_cell(cell, shared, _cell_directory(out_dir, _key(cell)), train)
        rows[row.key] = row
        _write_table(out_dir / directory.TABLE, rows)
        clock.add_cell()
        show(cell_line(row, clock))


def _write_table(path: Path, rows: dict[Key, Row]) -> None:
    """Replaces sweep.csv; goes on without where that fails, to try again after the next cell."""
    try:
        table.write_table(path, table.with_speedups(list(rows.values())))
    except OSError as error:
        show(f"Warning   {path} cannot be written ({error.strerror}); the sweep goes on.")


def run_cell(cell: Cell, shared: TrainConfig, path: Path, train: Path | str) -> Row:
    """The cell's row, from a run of train.py in a process of its own; a failure is a row, too.

    Args:
        cell: the cell.
        shared: what all cells have in common.
        path: the cell's run directory; what an earlier try left there is removed.
        train: the module, or the path, of train.py.
    """
    shutil.rmtree(path, ignore_errors=True)
    row = table.empty_row(cell, shared.num_towers)
    root = str(Path(__file__).parents[3])  # where `towers` is, installed or not
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = train_flags(cell.config(shared))
    process = subprocess.Popen(
        [sys.executable, "-m", "towers.app.sweep.child", str(os.getpid()), train, path, *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # log.txt has it
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        stderr = process.communicate()[1]
    finally:
        process.kill()  # where Ctrl-C has come; its checkpoint would not be used
        process.wait()
    if process.returncode:
        return row._replace(error=error_line(process.returncode, stderr))
    shutil.rmtree(path / run_dir.CHECKPOINTS, ignore_errors=True)  # nothing goes on from here
    try:
        measured = json.loads((path / MEASURED).read_text(encoding="utf-8"))
        results = _read_results(path / run_dir.RESULTS)
        return table.filled_row(
            row, results, measured["host_memory_mb"], measured["device_memory_mb"]
        )
    except (OSError, ValueError, LookupError) as error:
        return row._replace(error=f"the run left no figures: {one_line(error)}.")


def error_line(code: int, stderr: str) -> str:
    """Why train.py failed, in one line.

    Args:
        code: its exit code, negative for a signal.
        stderr: what it wrote there: an `error:` line, or a traceback.
    """
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; is there too little memory?" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    last = (errors or lines or [f"exit code {code}, without a word"])[-1]
    return last.removeprefix("error: ")


def _conclude(out_dir: Path, shared: TrainConfig, rows: list[Row]) -> list[Row]:
    """The picture, and the last line; returns the rows as sweep.csv has them."""
    rows = table.with_speedups(rows)
    machine, *others = _machines(out_dir, rows) or [_UNKNOWN]
    if others:
        where = ", ".join(map(str, [machine, *others]))
        show(f"Warning   the cells ran on different machines ({where}): do not compare them.")
    models = ", ".join(dict.fromkeys(row.model for row in rows if not row.error))
    title = f"towers: {models} on {shared.dataset}, {machine}"
    written = [directory.TABLE]
    try:
        if models:
            draw_sweep(out_dir / directory.CHART, rows, title, _note(shared, machine), machine)
            written.append(directory.CHART)
    except Exception as error:  # a picture is not worth a sweep
        show(f"Warning   {directory.CHART} cannot be drawn: {one_line(error)}.")
    show(f"Wrote     {', '.join(str(out_dir / name) for name in written)}")
    show(f"Advice    {advice(rows, machine)}")
    return rows


def _note(shared: TrainConfig, machine: Machine) -> str:
    """The line below the picture's title."""
    length = f"{shared.epochs} {plural('epoch', shared.epochs)} each"
    if shared.max_steps is not None:
        length = f"{counted(shared.max_steps, 'step')} each"
    note = f"{length}; {shared.precision}. A ring: the smallest global batch from which more "
    note += f"{'GPUs' if machine.gpu else 'devices'} are faster than 1."
    return note if machine.gpu else f"{note} No GPU here: the figures say little about GPUs."


def _machines(out_dir: Path, rows: Sequence[Row]) -> list[Machine]:
    """The machines that the done cells ran on: one, unless the directory has moved."""
    found = []
    for row in rows:
        try:
            text = (_cell_directory(out_dir, row.key) / MEASURED).read_text(encoding="utf-8")
            measured = json.loads(text)
            found.append(Machine(measured["gpu"], measured["cores"]))
        except (OSError, ValueError, LookupError):
            continue
    return list(dict.fromkeys(found))


def _counted(cells: Sequence[Cell], left: Sequence[Cell], rows: dict[Key, Row]) -> str:
    """"8", or "8: 3 done before, 1 failed (--retry_failed tries again)"."""
    before = [rows[_key(cell)] for cell in cells if cell not in left]
    failed = sum(bool(row.error) for row in before)
    text = f"{len(cells)}"
    if before:
        text += f": {len(before) - failed} done before"
    return f"{text}, {failed} failed (--retry_failed tries again)" if failed else text


def _read_results(path: Path) -> list[run_dir.Result]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        run_dir.Result.of(list(map(float, row.values())), list(row)[1:-2]) for row in rows
    ]


def _cell_directory(out_dir: Path, key: Key) -> Path:
    return out_dir / directory.CELLS / cell_name(*key)


def _key(cell: Cell) -> Key:
    return cell.label, cell.batch_size, cell.num_gpus


def _is_open(row: Row | None, retry_failed: bool) -> bool:
    """Whether a cell is still to run, given its row if it has one."""
    return row is None or retry_failed and bool(row.error)
