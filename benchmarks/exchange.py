"""Times the sum over W workers, real processes of this machine, against TensorFlow's ring.

    python benchmarks/exchange.py --workers=2,4,8 --rounds=5

The ring all-reduces the same bytes, but adds in another order. All workers share the cores of this
machine, and loopback is their network. The rows also hold the megabytes that one worker sends.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.process import run_workers

_WORKERS = flags.DEFINE_list("workers", ["2", "4", "8"], "Numbers of workers.")
_MEGABYTES = flags.DEFINE_list(
    "megabytes",
    ["32", "4.8", "0.1"],
    "Sizes to exchange, in 10**6 bytes of float32. List the "
    "largest first: malloc then keeps the memory, as it does in a process that trains.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of each comparison.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def compare_exchange(num_workers: int) -> Iterator[list[dict[str, Any]]]:
    """Compares the exchange with the ring; yields the rows of each size."""
    measured = run_workers(
        "exchange_case.measure_exchange",
        num_workers,
        megabytes=list(map(float, _MEGABYTES.value)),
        rounds=_ROUNDS.value,
    )
    shared = {
        "device": measured[0]["device"],
        "peak_memory_mb": max(worker["peak_memory_mb"] for worker in measured),
    }
    for size in measured[0]["sizes"]:
        results = [
            {"exchange": {"ms": ours, **shared}, "ring": {"ms": peer, **shared}}
            for ours, peer in zip(size["exchange"], size["ring"], strict=True)
        ]
        yield rounds.compare(
            results,
            "exchange",
            "ms",
            workload=f"{size['megabytes']:g} MB",
            num_devices=num_workers,
            steps=size["calls"],
            sent_mb=size["sent_mb"],
        )


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV after each number of workers."""
    del argv
    for num_workers in map(int, _WORKERS.value):
        rows = [row for new in compare_exchange(num_workers) for row in new]
        rounds.append_csv(_OUT.value, rows)
        print(rounds.table(rows), flush=True)


if __name__ == "__main__":
    app.run(main)
