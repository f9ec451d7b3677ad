"""Measures several workers, as real processes of this machine: training, the exchange, memory.

    python benchmarks/machines.py
    python benchmarks/machines.py --parts=scaling --workloads=cnn,gru --rounds=3

Each part writes its own rows to the CSV:

    training    2 workers with one tower each against 1 worker with 2 towers, examples per second
    exchange    milliseconds of the sum over W workers, against TensorFlow's ring all-reduce of the
                same bytes, which adds in another order; and the megabytes that one worker sends
    memory      megabytes of each of 2 workers after 200 and after 1,000 steps
    input       W workers decode a global batch of 64 JPEG images of 375x500 and resize them to
                224x224: milliseconds per batch if each worker reads the images of its own tower,
                against all images
    scaling     one tower against 2, 4 and 8 towers in one process, against as many workers with
                one tower each, and against one tower without averaging and update

All workers share the cores of this machine, and loopback is their network.
"""

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.process import run_workers

Rows = list[dict[str, Any]]

_PARTS = flags.DEFINE_list(
    "parts", ["training", "exchange", "memory", "input"], "The parts to measure."
)
_WORKLOADS = flags.DEFINE_list(
    "workloads", ["cnn", "mlp41m", "gru"], "Names in workloads.py, for training and scaling."
)
_WORKERS = flags.DEFINE_list(
    "workers", ["2", "4", "8"], "Numbers of workers, for exchange, input and scaling."
)
_MEGABYTES = flags.DEFINE_list(
    "megabytes",
    ["32", "4.8", "0.1"],
    "Sizes to exchange, in 10**6 bytes of float32. List the "
    "largest first: malloc then keeps the memory, as it does in a process that trains.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of each comparison.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Timed training steps. Default: the workload's number.", lower_bound=2
)
_MEMORY_STEPS = flags.DEFINE_list(
    "memory_steps", ["200", "1000"], "The two steps after which memory is read."
)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV after each comparison."""
    del argv
    rows = []
    for new in measure_parts(_PARTS.value):
        rounds.append_csv(_OUT.value, new)
        rows += new
    print(rounds.table(rows))


def measure_parts(parts: Sequence[str]) -> Iterator[Rows]:
    """Yields the rows of each comparison."""
    counts = list(map(int, _WORKERS.value))
    if "training" in parts:
        yield from map(compare_training, _WORKLOADS.value)
    if "exchange" in parts:
        for num_workers in counts:
            yield from compare_exchange(num_workers)
    if "memory" in parts:
        yield compare_memory()
    if "input" in parts:
        yield from map(compare_input, [1, *counts])
    if "scaling" in parts:
        for workload in _WORKLOADS.value:
            yield compare_scaling(workload, counts)


def compare_training(workload: str) -> Rows:
    """Compares 2 workers with one tower each with 1 worker with 2 towers."""
    return _compare_runs(
        workload,
        2,
        {
            "2 workers": {"num_workers": 2, "num_devices": 1},
            "1 worker": {"num_devices": 2},
        },
    )


def compare_scaling(workload: str, counts: Sequence[int]) -> Rows:
    """Compares one tower with more towers and workers, at the same global batch."""
    contenders: dict[str, dict[str, Any]] = {
        "1 tower": {"num_devices": 1},
        "limit": {"contender": "limit", "num_devices": 1},
    }
    for count in counts:
        contenders[f"{count} towers"] = {"num_devices": count}
        contenders[f"{count} workers"] = {"num_workers": count, "num_devices": 1}
    return _compare_runs(workload, 1, contenders)


def _compare_runs(workload: str, num_devices: int, contenders: dict[str, dict[str, Any]]) -> Rows:
    """Compares the examples per second of the first contender with the others."""
    ours = next(iter(contenders))
    for arguments in contenders.values():
        arguments |= {"workload": workload, "steps": _STEPS.value}
    results = rounds.run_rounds("contender.measure", contenders, _ROUNDS.value)
    return rounds.compare(
        results,
        ours,
        "examples_per_second",
        workload=workload,
        num_devices=num_devices,
        steps=results[0][ours]["steps"],
    )


def compare_exchange(num_workers: int) -> list[Rows]:
    """Compares the exchange with the ring; returns the rows of each size."""
    measured = run_workers(
        "machines_case.measure_exchange",
        num_workers,
        megabytes=list(map(float, _MEGABYTES.value)),
        rounds=_ROUNDS.value,
    )
    shared = _of_all_workers(measured)
    comparisons = []
    for size in measured[0]["sizes"]:
        results = [
            {"exchange": {"ms": ours, **shared}, "ring": {"ms": peer, **shared}}
            for ours, peer in zip(size["exchange"], size["ring"], strict=True)
        ]
        comparisons.append(
            rounds.compare(
                results,
                "exchange",
                "ms",
                workload=f"{size['megabytes']:g} MB",
                num_devices=num_workers,
                steps=size["calls"],
                sent_mb=size["sent_mb"],
            )
        )
        _print_medians(num_workers, f"{size['megabytes']:g} MB", results)
    return comparisons


def compare_memory() -> Rows:
    """Compares the memory after many steps with the memory after few; a round is a worker."""
    early, late = sorted(map(int, _MEMORY_STEPS.value))
    measured = run_workers("machines_case.measure_memory", 2, steps=[early, late])
    results = [
        {f"{count} steps": {**worker, "memory_mb": worker[str(count)]} for count in (late, early)}
        for worker in measured
    ]
    return rounds.compare(
        results,
        f"{late} steps",
        "memory_mb",
        workload="tiny",
        num_devices=2,
        steps=late,
    )


def compare_input(num_workers: int) -> Rows:
    """Compares reading the worker's own images with reading all; the slowest worker counts."""
    with tempfile.TemporaryDirectory() as folder:
        measured = run_workers(
            "machines_case.measure_input", num_workers, folder=folder, rounds=_ROUNDS.value
        )
    shared = _of_all_workers(measured)
    results = [
        {
            f"{way} images": {"ms": max(worker[way][index] for worker in measured), **shared}
            for way in ("own", "all")
        }
        for index in range(_ROUNDS.value)
    ]
    _print_medians(num_workers, "images", results)
    return rounds.compare(
        results,
        "own images",
        "ms",
        workload="images",
        num_devices=num_workers,
        steps=measured[0]["calls"],
    )


def _of_all_workers(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the device and the largest peak memory of any worker."""
    return {
        "device": measured[0]["device"],
        "peak_memory_mb": max(worker["peak_memory_mb"] for worker in measured),
    }


def _print_medians(num_workers: int, what: str, results: Sequence[dict[str, Any]]) -> None:
    medians = {name: statistics.median(one[name]["ms"] for one in results) for name in results[0]}
    print(
        f"{num_workers} workers  {what}  "
        + "  ".join(f"{name} {median:.1f} ms" for name, median in medians.items()),
        flush=True,
    )


if __name__ == "__main__":
    app.run(main)
