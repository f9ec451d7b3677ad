"""Writes the sweep's last line: the fastest setting, and from which batch on more GPUs pay."""

from collections.abc import Sequence
from itertools import takewhile

from towers.app.sweep.table import Row
from towers.machine.words import counted


def advice(rows: Sequence[Row], on_gpus: bool) -> str:
    """Returns one sentence of advice.

    Args:
        rows: all cells, with speed-ups.
        on_gpus: whether the cells ran on GPUs.
    """
    done = [row for row in rows if not row.error]
    if not done:
        return f"No cell could run: {rows[0].error.rstrip('.')}."
    clauses = []
    for model in dict.fromkeys(row.model for row in done):
        own = [row for row in done if row.model == model]
        best = max(own, key=lambda row: row.examples_per_second or 0.0)
        clauses.append(
            f"{model} is fastest at a global batch of {best.batch_size:,} on "
            f"{counted(best.num_gpus, 'device')} ({best.examples_per_second:,.0f} examples/s)"
        )
        for count in sorted({row.num_gpus for row in own} - {1}):
            clauses.append(f"{count} devices {_verdict(own, count, on_gpus)}")
    where = "" if on_gpus else "On logical CPU devices, which say little about GPUs, "
    return f"{where}{'; '.join(clauses)}."


def _verdict(rows: Sequence[Row], num_gpus: int, on_gpus: bool) -> str:
    """Says from which batch on a GPU count pays, or why it does not."""
    smallest, with_speedup = break_even(rows, num_gpus), compared(rows, num_gpus)
    if smallest is not None:
        return f"pay from a global batch of {smallest:,} on"
    if not with_speedup:
        return "have no speed-up, because 1 device was not measured"
    last, reason = with_speedup[-1], "they share the cores that 1 device has alone"
    if on_gpus:
        reason = "a step computes too little for what it moves; try larger batches or --profile"
    return f"do not pay ({last.speedup:.2f} times 1 device at {last.batch_size:,}): {reason}"


def break_even(rows: Sequence[Row], num_gpus: int) -> int | None:
    """Returns the smallest global batch from which on `num_gpus` are faster than 1, or None.

    At this batch and at every larger one that has a speed-up, the speed-up is above 1.

    Args:
        rows: the rows of one model, with speed-ups.
        num_gpus: the GPU count, above 1.
    """
    found = reversed(compared(rows, num_gpus))
    pay = list(takewhile(lambda row: (row.speedup or 0.0) > 1, found))
    return pay[-1].batch_size if pay else None


def compared(rows: Sequence[Row], num_gpus: int) -> list[Row]:
    """Returns the rows with this GPU count that have a speed-up, by increasing global batch."""
    found = [row for row in rows if row.num_gpus == num_gpus and row.speedup is not None]
    return sorted(found, key=lambda row: row.batch_size)
