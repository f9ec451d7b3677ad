"""From which global batch on n GPUs are faster than 1."""

from collections.abc import Sequence

from towers.sweep.table import Row


def break_even(rows: Sequence[Row], num_gpus: int) -> int | None:
    """The smallest global batch from which on `num_gpus` are faster than 1; None where never.

    At this batch and at every larger one that has a speed-up, the speed-up is above 1.

    Args:
        rows: of one model, with speed-ups.
        num_gpus: above 1.
    """
    found = None
    for row in sorted(compared(rows, num_gpus), key=lambda row: -row.batch_size):
        if row.speedup is None or row.speedup <= 1:
            break
        found = row.batch_size
    return found


def compared(rows: Sequence[Row], num_gpus: int) -> list[Row]:
    """The rows of that GPU count that have a speed-up, by increasing global batch."""
    found = [row for row in rows if row.num_gpus == num_gpus and row.speedup is not None]
    return sorted(found, key=lambda row: row.batch_size)


def gpu_counts(rows: Sequence[Row]) -> list[int]:
    """The GPU counts that have at least one cell done, increasing."""
    return sorted({row.num_gpus for row in rows if not row.error})
