"""Reads and writes sweep.csv, a row for each cell, and draws the advice from it."""

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, NamedTuple

from towers.machine import files
from towers.machine.places import LostDirectoryError
from towers.machine.words import counted
from towers.resume.directories import write_text


_LARGEST = 2**24  # bytes of a table


class Row(NamedTuple):
    """Holds one cell; None is an empty field. A failed cell has the first five and its error."""

    model: str
    batch_size: int  # the global batch
    per_tower_batch: int  # the largest shard of the global batch
    num_gpus: int  # devices that ran towers; logical CPU devices if there is no GPU
    num_towers: int  # on all devices
    epochs: int | None = None  # in results.csv; --max_steps may end the last one early
    accuracy: float | None = None  # of the last epoch
    val_accuracy: float | None = None  # of the last epoch
    seconds: float | None = None  # of all epochs, with validation and the tracing of the first step
    examples_per_second: float | None = None  # harmonic mean over the epochs; training steps only
    speedup: float | None = None  # against 1 GPU at the same model and batch, if this was measured
    efficiency: float | None = None  # speedup / num_gpus
    host_memory_mb: float | None = None  # empty, as the next one; earlier versions measured them
    device_memory_mb: float | None = None
    error: str = ""  # one line; empty if the cell is done
    noise_scale: float | None = None  # of the last epoch, if the sweep measures it
    useful_share: float | None = None  # of the examples of a batch; see `with_speedups`

    @property
    def key(self) -> tuple[str, int, int]:
        """Returns the values that identify a row: model, global batch and GPU count."""
        return self.model, self.batch_size, self.num_gpus


def filled_row(row: Row, results: Path) -> Row:
    """Returns a finished cell's row, with the figures from its run's results.csv."""
    epochs = _lines(results)
    last = epochs[-1]
    if "noise_scale" in last:
        row = row._replace(noise_scale=float(last["noise_scale"]))
    return row._replace(
        epochs=len(epochs),
        accuracy=float(last["accuracy"]),
        val_accuracy=float(last["val_accuracy"]),
        seconds=sum(float(epoch["seconds"]) for epoch in epochs),
        # Equals all examples / all seconds, because every epoch has as many examples.
        examples_per_second=harmonic_mean(float(e["examples_per_second"]) for e in epochs),
    )


def with_speedups(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows with what follows from others, sorted by model, batch, GPU count.

    A share of 1 / (1 + batch / noise scale) of a batch's examples is useful (McCandlish et al.,
    arXiv 1812.06162, 2018). A cell with one tower has the noise scale of one with more towers.
    """
    rows, found = list(rows), []
    models = [row.model for row in rows]
    speeds = {row.key: row.examples_per_second for row in rows}
    scales = {row.key[:2]: row.noise_scale for row in rows if row.noise_scale}
    for row in sorted(rows, key=lambda row: (models.index(row.model), *row.key[1:])):
        if row.examples_per_second:
            if alone := speeds.get((row.model, row.batch_size, 1)):
                speedup = row.examples_per_second / alone
                row = row._replace(speedup=speedup, efficiency=speedup / row.num_gpus)
            if scale := scales.get(row.key[:2]):
                row = row._replace(useful_share=1 / (1 + row.batch_size / scale))
        found.append(row)
    return found


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Replaces sweep.csv by a file with these rows."""
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
    """Returns the rows that `write_table` wrote; none if there is no file."""
    if not path.exists():
        return []
    try:
        return [
            Row(**{name: _value(name, text) for name, text in line.items() if text})
            for line in _lines(path)
        ]
    except (OSError, TypeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path} is not what a sweep wrote ({why}); name another `out_dir`."
        ) from None


def _value(name: str, text: str) -> Any:
    if name in ("model", "error"):
        return text
    return int(text) if text.isdecimal() else float(text)


def _lines(path: Path) -> list[dict[str, str]]:
    """Returns the lines of a table by column."""
    return list(csv.DictReader(io.StringIO(files.read_text(path, _LARGEST), newline="")))


def advice(rows: Sequence[Row], on_gpus: bool) -> str:
    """Returns one sentence: each model's fastest cell, and from which batch on more GPUs are faster."""
    done = [row for row in rows if not row.error]
    if not done:
        return f"No cell could run: {rows[0].error.rstrip('.')}."
    clauses = []
    for model in dict.fromkeys(row.model for row in done):
        own = [row for row in done if row.model == model]
        best = max(own, key=lambda row: row.examples_per_second or 0)
        clauses.append(
            f"{model} is fastest at a global batch of {best.batch_size:,} on "
            f"{counted(best.num_gpus, 'device')} ({best.examples_per_second:,.0f} examples/s)"
        )
        best = max(own, key=lambda row: (row.examples_per_second or 0) * (row.useful_share or 0))
        if best.useful_share:
            clauses.append(
                f"counting the examples that help, {model} learns fastest at {best.batch_size:,} "
                f"on {counted(best.num_gpus, 'device')} ({best.useful_share:.0%} of "
                f"{best.examples_per_second:,.0f} examples/s)"
            )
        for count in sorted({row.num_gpus for row in own} - {1}):
            verdict = _verdict([row for row in own if row.num_gpus == count], on_gpus)
            clauses.append(f"{count} devices {verdict}")
    text = f"{'; '.join(clauses)}."
    if not on_gpus:
        return f"On logical CPU devices, which say little about GPUs, {text}"
    return text


def _verdict(rows: Sequence[Row], on_gpus: bool) -> str:
    """Says from which batch on a GPU count is faster, or why it is not.

    At this batch and at every larger one that has a speed-up, the speed-up is above 1.
    """
    speedups = sorted((row.batch_size, row.speedup) for row in rows if row.speedup is not None)
    if not speedups:
        return "have no speed-up, because 1 device was not measured"
    faster = list(takewhile(lambda pair: pair[1] > 1, reversed(speedups)))
    if faster:
        return f"are faster from a global batch of {faster[-1][0]:,} on"
    (batch_size, speedup), reason = speedups[-1], "because they share the same cores"
    if on_gpus:
        reason = (
            "because a step computes too little for what it moves. Try larger batches or --profile"
        )
    factor = f"{speedup:.2f} times its speed at a global batch of {batch_size:,}"
    return f"are not faster than 1 ({factor}), {reason}"
