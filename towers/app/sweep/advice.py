"""The sweep's last line: which setting is fastest, and from which batch on more GPUs pay."""

from collections.abc import Sequence

from towers.app.sweep.cells import Machine
from towers.app.sweep.table import Row

_GROWS = 1.1  # from the smallest to the largest batch, above the noise of short runs


def advice(rows: Sequence[Row], machine: Machine) -> str:
    """One sentence.

    Args:
        rows: all cells, with speed-ups.
        machine: what they ran on.
    """
    done = [row for row in rows if not row.error]
    if not done:
        first = f": {rows[0].error}" if rows else ""
        return f"No cell could run{first}".rstrip(".") + "."
    clauses = [
        _clause([row for row in done if row.model == model], machine)
        for model in dict.fromkeys(row.model for row in done)
    ]
    where = "" if machine.gpu else "On logical CPU devices, which say little about GPUs, "
    return f"{where}{'; '.join(clauses)}."


def _clause(rows: Sequence[Row], machine: Machine) -> str:
    """The advice on one model."""
    best = max(rows, key=lambda row: row.examples_per_second or 0.0)
    figures = f"{best.examples_per_second:,.0f} examples/s"
    if best.num_gpus > 1 and best.speedup is not None:
        figures += f", {best.speedup:.2f} times {machine.devices(1)}"
    fastest = (
        f"{best.model} is fastest at a global batch of {best.batch_size:,} on "
        f"{machine.devices(best.num_gpus)} ({figures})"
    )
    counts = [count for count in gpu_counts(rows) if count > 1]
    told = [count for count in counts if compared(rows, count)]
    if told:
        return f"{fastest}, and {_verdicts(rows, told, machine)}"
    if counts:
        return f"{fastest}, and with no cell on {machine.devices(1)} there is no speed-up to tell"
    return fastest


def _verdicts(rows: Sequence[Row], counts: Sequence[int], machine: Machine) -> str:
    """From which batch on the device counts pay, those alike together; and why others never do."""
    found = {count: break_even(rows, count) for count in counts}
    parts = []
    for size in sorted({size for size in found.values() if size is not None}):
        alike = [count for count in counts if found[count] == size]
        parts.append(f"{_devices(alike, machine)} pay from a global batch of {size:,} on")
    never = [count for count in counts if found[count] is None]
    if never:
        reason = _reason(rows, never, machine)
        parts.append(f"{_devices(never, machine)} do not pay, because {reason}")
    return _listed(parts)


def _reason(rows: Sequence[Row], counts: Sequence[int], machine: Machine) -> str:
    """Why they do not pay, even at the largest batch: what they share, or how they get there."""
    if machine.gpu is None:
        return f"they share the {machine.cores} cores that {machine.devices(1)} has for itself"
    fewest = compared(rows, counts[0])  # whose towers have the most examples
    first, last = fewest[0], fewest[-1]
    speed = f"{_speedup(last):.2f} times 1 GPU with {last.num_gpus} at {last.batch_size:,}"
    if _speedup(last) > _GROWS * _speedup(first):
        return (
            f"{last.per_tower_batch:,} examples a tower are too few ({speed}, and still growing "
            "with the batch: try larger ones)"
        )
    return f"the model computes too little for the parameters that each step moves ({speed})"


def _speedup(row: Row) -> float:
    assert row.speedup is not None  # `compared` leaves the others out
    return row.speedup


def _devices(counts: Sequence[int], machine: Machine) -> str:
    """"2, 4 and 8 GPUs"."""
    *others, last = counts
    return _listed([*map(str, others), machine.devices(last)])


def _listed(parts: Sequence[str]) -> str:
    """"a, b and c"."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


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
