"""Measures several workers, as real processes of this machine: training, the exchange, memory.

    python benchmarks/machines.py

    python benchmarks/machines.py --parts=scaling --workloads=cnn,gru --rounds=3

There are five parts, each with its own rows in the CSV:

    training    2 workers x 1 tower against 1 worker x 2 towers: the same run, examples per second
    exchange    milliseconds of the sum over W workers, against TensorFlow's ring all-reduce of the
                same bytes, which adds in an order of its own; and the megabytes a worker sends
    memory      megabytes of each of 2 workers after 200 and after 1,000 steps
    input       W workers that decode a global batch of 64 JPEG images of 375x500 and resize them to
                224x224: milliseconds of a batch if each reads only the images of its own tower,
                against all images
    scaling     one tower against 2, 4 and 8 in one process, and as many workers with a tower each;
                and against itself without averaging and update, which tells what these cost

All workers share this machine's cores, and loopback is their network.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds  # noqa: E402  (found through the line above)
from benchmarks.process import run_workers  # noqa: E402

_PARTS = flags.DEFINE_list(
    "parts", ["training", "exchange", "memory", "input"], "Which are measured."
)
_WORKLOADS = flags.DEFINE_list("workloads", ["cnn", "mlp41m", "gru"], "That are trained.")
_WORKERS = flags.DEFINE_list("workers", ["2", "4", "8"], "That exchange.")
_MEGABYTES = flags.DEFINE_list(
    "megabytes", ["32", "4.8", "0.1"], "That they exchange, of float32; 10**6 bytes. The largest "
    "first: malloc keeps memory then, as it does in a process that trains.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of each comparison, in turn.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Timed steps of training. Default: the workload's.", lower_bound=2
)
_MEMORY_STEPS = flags.DEFINE_list("memory_steps", ["200", "1000"], "After which memory is noted.")
_OUT = flags.DEFINE_string("out", "benchmarks/results/machines.csv", "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV after each comparison."""
    del argv
    rows = []
    for new in measurements(_PARTS.value):
        rounds.append_csv(Path(_OUT.value), new)
        rows += new
    print(rounds.table(rows))


def measurements(parts: Sequence[str]) -> Any:
    """The rows of one comparison after the other."""
    if "training" in parts:
        yield from map(training, _WORKLOADS.value)
    if "exchange" in parts:
        for num_workers in map(int, _WORKERS.value):
            yield from exchange(num_workers)
    if "memory" in parts:
        yield memory()
    if "input" in parts:
        yield from map(read_images, [1, *map(int, _WORKERS.value)])
    if "scaling" in parts:
        yield from map(scaling, _WORKLOADS.value)


def training(workload: str) -> list[dict[str, Any]]:
    """2 workers with a tower each against 1 with both."""
    given = {"workload": workload} | ({} if _STEPS.value is None else {"steps": _STEPS.value})
    contenders = {
        "2 workers": {"num_workers": 2, "num_devices": 1, **given},
        "1 worker": {"num_devices": 2, **given},
    }
    results = rounds.run_rounds("contender", contenders, _ROUNDS.value)
    return rounds.compare(
        results, "2 workers", "examples_per_second",
        workload=workload, num_devices=2, steps=results[0]["1 worker"]["steps"], sent_mb="",
    )


def exchange(num_workers: int) -> list[list[dict[str, Any]]]:
    """The exchange against the ring: the rows of each size."""
    measured = run_workers(
        "machines_case", num_workers, case="exchange", megabytes=",".join(_MEGABYTES.value),
        rounds=_ROUNDS.value,
    )
    everybody = {"device": measured[0]["device"],
                 "peak_memory_mb": max(worker["peak_memory_mb"] for worker in measured)}
    comparisons = []
    for size in measured[0]["sizes"]:
        results = [
            {"exchange": {"ms": ours, **everybody}, "ring": {"ms": peer, **everybody}}
            for ours, peer in zip(size["exchange"], size["ring"], strict=True)
        ]
        comparisons.append(rounds.compare(
            results, "exchange", "ms", workload=f"{size['megabytes']:g} MB",
            num_devices=num_workers, steps=size["calls"], sent_mb=size["sent_mb"],
        ))
        print(f"{num_workers} workers  {size['megabytes']:g} MB  " + "  ".join(
            f"{name} {statistics.median(size[name]):.1f} ms" for name in ("exchange", "ring")
        ), flush=True)
    return comparisons


def memory() -> list[dict[str, Any]]:
    """Late against early; a round is a worker."""
    early, late = sorted(_MEMORY_STEPS.value, key=int)
    measured = run_workers("machines_case", 2, case="memory", steps=f"{early},{late}")
    names = {late: f"{late} steps", early: f"{early} steps"}
    results = [
        {names[mark]: {**worker, "memory_mb": worker[mark]} for mark in names}
        for worker in measured
    ]
    return rounds.compare(
        results, names[late], "memory_mb", workload="tiny", num_devices=2, steps=int(late),
        sent_mb="",
    )


def read_images(num_workers: int) -> list[dict[str, Any]]:
    """Own images against all images; a batch takes as long as the slowest worker's."""
    with tempfile.TemporaryDirectory() as folder:
        measured = run_workers(
            "machines_case", num_workers, case="input", folder=folder, rounds=_ROUNDS.value
        )
    names = {"own": "own images", "all": "all images"}
    results = [
        {names[way]: {
            **measured[0], "ms": max(worker[way][index] for worker in measured),
            "peak_memory_mb": max(worker["peak_memory_mb"] for worker in measured),
        } for way in names}
        for index in range(_ROUNDS.value)
    ]
    rows = rounds.compare(
        results, names["own"], "ms", workload="images", num_devices=num_workers,
        steps=measured[0]["calls"], sent_mb="",
    )
    print(f"{num_workers} workers  " + "  ".join(
        f"{name} {statistics.median(result[name]['ms'] for result in results):.0f} ms"
        for name in names.values()
    ), flush=True)
    return rows


def scaling(workload: str) -> list[dict[str, Any]]:
    """One tower against more, at the same global batch; `num_devices` is its own, 1."""
    given = {"workload": workload} | ({} if _STEPS.value is None else {"steps": _STEPS.value})
    contenders: dict[str, dict[str, Any]] = {"1 tower": {"num_devices": 1, **given}}
    contenders["limit"] = {"contender": "limit", "num_devices": 1, **given}
    for count in map(int, _WORKERS.value):
        contenders[f"{count} towers"] = {"num_devices": count, **given}
        contenders[f"{count} workers"] = {"num_workers": count, "num_devices": 1, **given}
    results = rounds.run_rounds("contender", contenders, _ROUNDS.value)
    return rounds.compare(
        results, "1 tower", "examples_per_second",
        workload=workload, num_devices=1, steps=results[0]["1 tower"]["steps"], sent_mb="",
    )


if __name__ == "__main__":
    app.run(main)
