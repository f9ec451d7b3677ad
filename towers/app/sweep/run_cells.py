"""Runs every cell of a sweep, model x global batch x GPU count, as a new train.py.

OUT_DIR/
    sweep.json   the cells' settings; models, batches and GPU counts may be added
    sweep.csv    a row for each cell; a cell with a row is not run again
    sweep.png    the picture
    cells/       a run directory for each cell, such as cells/cnn-batch128-gpus2/
"""

import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from towers import __version__
from towers.app import child_process
from towers.app.command_line import show
from towers.app.config import TrainConfig
from towers.app.named import one_line
from towers.app.reporting.charts import or_warning
from towers.app.sweep import table
from towers.app.sweep.chart import draw_sweep
from towers.app.sweep.table import Row
from towers.machine import files, nvidia
from towers.machine.words import counted
from towers.app import run_dir
from towers.resume import directories

SETTINGS, TABLE, CHART, CELLS = "sweep.json", "sweep.csv", "sweep.png", "cells"


def make_cells(
    models: Sequence[str],
    batch_sizes: Sequence[str],
    gpu_counts: Sequence[str],
    shared: TrainConfig,
) -> dict[Row, TrainConfig]:
    """Returns all cells in running order: the row without figures -> the run's configuration."""
    if not all(models):
        raise ValueError(
            f"model ({','.join(models)}) must be a list of names, such as model=cnn,mlp."
        )
    batches = _counts("batch_sizes", batch_sizes, "64,128,256")
    counts = _counts("gpu_counts", gpu_counts, "1,2,4,8")
    most = max(counts)
    if shared.fixed_towers is not None and shared.fixed_towers < most:
        raise ValueError(
            f"num_towers ({shared.fixed_towers}) is below the largest of gpu_counts ({most}), "
            f"whose devices would have no tower. Use num_towers={most} or more."
        )
    cells = {}
    for model, batch_size, num_gpus in itertools.product(models, batches, counts):
        towers = shared.fixed_towers or num_gpus
        row = Row(model, batch_size, -(-batch_size // towers), num_gpus, towers)
        cells[row] = dataclasses.replace(
            shared,
            model=model,
            batch_size=batch_size,
            num_gpus=num_gpus,
            noise_scale=shared.noise_scale and towers > 1,
        )
    return cells


def _counts(argument: str, texts: Sequence[str], example: str) -> list[int]:
    if not texts or not all(text.isdecimal() and int(text) > 0 for text in texts):
        raise ValueError(
            f"{argument} ({','.join(texts)}) must be a list of whole numbers from 1 on, such as "
            f"{argument}={example}."
        )
    return [int(text) for text in texts]


def run_sweep(
    cells: Mapping[Row, TrainConfig],
    shared: TrainConfig,
    out_dir: Path,
    train: Sequence[str] = (sys.executable, "-m", "towers"),
) -> list[Row]:
    """Runs cells that have no row in `out_dir` by the command `train`; returns sweep.csv's rows."""
    _open(out_dir, shared)
    rows = {row.key: row for row in table.read_table(out_dir / TABLE)}
    left = [cell for cell in cells if cell.key not in rows]
    failed = sum(bool(rows[cell.key].error) for cell in cells if cell.key in rows)
    show(f"towers {'.'.join(__version__.split('.')[:2])} | sweep: {out_dir}")
    text = f"Cells     {len(cells)}, {len(left)} to run"
    if failed:
        text += f", {failed} failed before (remove a row from {TABLE} to run it again)"
    show(text)
    began = time.monotonic()
    for number, cell in enumerate(left, 1):
        try:
            row = _run(cell, cells[cell], out_dir, train)
        except KeyboardInterrupt:
            num_done = len(cells) - len(left) + number - 1
            show(
                f"{num_done} of {len(cells)} cells are done. Run the command again to continue "
                "with the rest."
            )
            raise
        rows[row.key] = row
        table.write_table(out_dir / TABLE, table.with_speedups(rows.values()))
        rest = (time.monotonic() - began) / number * (len(left) - number)
        show(f"{number}/{len(left)}  {_line(row)} | {timedelta(seconds=round(rest))} left")
    return _conclude(out_dir, shared, table.with_speedups(rows.values()))


def _open(out_dir: Path, shared: TrainConfig) -> None:
    """Makes a new sweep's directory; raises ValueError if it is not one of the same sweep."""
    path = out_dir / SETTINGS
    now = {**dataclasses.asdict(shared), "machine": _machine()}
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        if not any(out_dir.iterdir()):
            directories.write_text(path, json.dumps(now, indent=2) + "\n")
        then = json.loads(files.read_text(path))
        files.check_link(out_dir / CELLS)
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"out_dir ({out_dir}) cannot be used: {one_line(error)}. Name a new directory, or one "
            "of a sweep, that you can write to."
        ) from error
    differ = [f"{n} ({then.get(n)} there, {v} now)" for n, v in now.items() if then.get(n) != v]
    if differ:
        raise ValueError(
            f"out_dir ({out_dir}) holds a sweep with other settings: {', '.join(differ)}. Give the "
            "same ones to continue it, or name another directory."
        )


def _run(row: Row, config: TrainConfig, out_dir: Path, train: Sequence[str]) -> Row:
    """Runs train.py for one cell in a separate process; returns the row, also of a failure."""
    label, batch_size, num_gpus = row.key
    path = out_dir / CELLS / f"{directories.file_name(label)}-batch{batch_size}-gpus{num_gpus}"
    shutil.rmtree(path, ignore_errors=True)  # left by an earlier attempt
    given = {**config.given(), "run_dir": path}
    failure = child_process.run([*train, *(f"--{name}={value}" for name, value in given.items())])
    if failure is not None:
        return row._replace(error=failure)
    shutil.rmtree(path / directories.CHECKPOINTS, ignore_errors=True)  # no run continues from here
    try:
        return table.filled_row(row, path / run_dir.RESULTS)
    except (OSError, ValueError, LookupError) as error:
        return row._replace(error=f"the run left no figures: {one_line(error)}.")


def _ran_on_gpus(log: Path) -> bool:
    with files.open_to_read(log) as file:
        return re.search(rb"^Devices .*/gpu:", file.read(files.SMALL), re.MULTILINE) is not None


def _line(row: Row) -> str:
    """Returns "cnn  batch   128 on 2,    64 a tower     3,912 examples/s  val_accuracy 0.953"."""
    where = f"batch {row.batch_size:>5,} on {row.num_gpus}, {row.per_tower_batch:>5,} a tower"
    if row.error:
        return f"{row.model}  {where}  failed: {row.error}"
    figures = f"{row.examples_per_second:>8,.0f} examples/s  val_accuracy {row.val_accuracy:.3f}"
    return f"{row.model}  {where}  {figures}"


def _conclude(out_dir: Path, shared: TrainConfig, rows: list[Row]) -> list[Row]:
    """Draws the picture, prints the last lines, and returns the rows."""
    on_gpus = any(map(_ran_on_gpus, out_dir.glob(f"{CELLS}/*/{run_dir.LOG}")))
    done = [row for row in rows if not row.error]
    written = [TABLE]
    if done:
        models = ", ".join(dict.fromkeys(row.model for row in done))
        title = f"towers: {models} on {shared.dataset}, {_machine()}"
        length = counted(shared.epochs, "epoch")
        if shared.max_steps:
            length = counted(shared.max_steps, "step")
        devices = "GPUs" if on_gpus else "logical CPU devices, which say little about GPUs"
        note = f"{length} each; {shared.precision}; {devices}"
        with or_warning(CHART, lambda text: show(f"Warning   {text}")):
            draw_sweep(out_dir / CHART, done, title, note)
            written.append(CHART)
    show(f"Wrote     {', '.join(str(out_dir / name) for name in written)}")
    show(f"Advice    {table.advice(rows, on_gpus)}")
    return rows


def _machine() -> str:
    """Returns "16 CPUs, 2 x NVIDIA H100", without TensorFlow, which only the cells start."""
    gpus = Counter(gpu.name for gpu in nvidia.driver_gpus() or [])
    return ", ".join([f"{os.cpu_count()} CPUs", *(f"{n} x {name}" for name, n in gpus.items())])
