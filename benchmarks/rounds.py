"""Runs contenders in turn, each in a fresh process, and compares them within each round.

    round 0: towers, fit, mirrored, ...    round 1: mirrored, fit, towers, ...

The speed of a machine drifts, but the ratio of two runs in one round hardly changes.
"""

import csv
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, describe_machine
from benchmarks.process import ROOT, run_process

RESULTS = ROOT / "benchmarks" / "results.csv"  # benchmarks/all.py writes it
_LIMIT = 900.0  # seconds of a run; MirroredStrategy has hung on 8 devices of 2 cores
KEY = ["benchmark", "workload", "data", "num_devices", "contender", "peer", "measure"]
COLUMNS = [
    *KEY,
    *("round", "value", "peer_value", "ratio", "median_ratio"),
    *("peak_memory_mb", "peer_peak_memory_mb", "steps", "sent_mb", "passes", "device"),
    *("cores", "processor", "python", "tensorflow", "keras", "commit", "command"),
]


def run_rounds(
    function: str, contenders: Mapping[str, Mapping[str, Any]], num_rounds: int
) -> list[dict[str, dict[str, Any]]]:
    """Runs every contender once per round; every other round runs in reverse order.

    A peer that fails, for example because it cannot train a model, or hangs, is left out from then
    on.

    Args:
        function: the "module.function" of this package that measures a contender.
        contenders: the function's arguments for each contender. The peers follow the first one. An
            argument "function" names another function for this contender.
        num_rounds: number of rounds.

    Returns:
        One dict per round: {contender: result of the function}.

    Raises:
        RuntimeError: The first contender failed.
    """
    ours, *peers = contenders
    rounds = []
    for index in range(num_rounds):
        results = {}
        for name in [ours, *peers][:: -1 if index % 2 else 1]:
            try:
                given = {"function": function, "limit": _LIMIT, **contenders[name]}
                results[name] = run_process(**given)
                print(f"round {index}  {name:<12} {_line(results[name])}", flush=True)
            except RuntimeError as error:
                if name == ours:
                    raise
                peers.remove(name)
                print(f"{name} is left out: {error}", flush=True)
        rounds.append(results)
    return rounds


def compare(
    rounds: Sequence[Mapping[str, Mapping[str, Any]]], contender: str, measure: str, **shared: Any
) -> list[dict[str, Any]]:
    """Compares a contender with each peer that has a result in every round.

    Args:
        rounds: the result of `run_rounds`.
        contender: the contender's name.
        measure: the result to compare, such as "examples_per_second".
        shared: columns with the same value in all rows.

    Returns:
        One row per round and peer with both values, contender / peer, and the median of this ratio
        over the rounds.
    """
    rows = []
    for peer in rounds[0]:
        if peer == contender or not all(peer in results for results in rounds):
            continue
        ratios = [results[contender][measure] / results[peer][measure] for results in rounds]
        for index, results in enumerate(rounds):
            ours, other = results[contender], results[peer]
            rows.append(
                {
                    **shared,
                    "contender": contender,
                    "peer": peer,
                    "round": index,
                    "measure": measure,
                    "value": round(ours[measure], 3),
                    "peer_value": round(other[measure], 3),
                    "ratio": round(ratios[index], 3),
                    "peak_memory_mb": round(ours["peak_memory_mb"]),
                    "peer_peak_memory_mb": round(other["peak_memory_mb"]),
                    "median_ratio": round(statistics.median(ratios), 3),
                    "device": ours["device"],
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the medians, one line per workload, device count and peer."""
    lines = [
        f"{'workload':<14}{'devices':>8}{'contender':>12}{'median':>12}{'peer':>12}"
        f"{'median':>12}{'ratio':>8}"
    ]
    for group in group_comparisons(rows):
        first = group[0]
        ours, other = (
            statistics.median(float(row[key]) for row in group) for key in ("value", "peer_value")
        )
        lines.append(
            f"{first['workload']:<14}{first['num_devices']:>8}{first['contender']:>12}"
            f"{ours:>12,.1f}{first['peer']:>12}{other:>12,.1f}{float(first['median_ratio']):>8.2f}"
        )
    return "\n".join(lines)


def group_comparisons(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Returns the rows of each comparison; if it was repeated, only the newest rows."""
    found: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(str(row.get(name, "")) for name in KEY)
        if int(row["round"]) == 0:
            found[key] = []
        found.setdefault(key, []).append(row)
    return list(found.values())


def append_csv(path: str | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows with the benchmark, the machine, the commit and the command.

    Args:
        path: the table, which gets a header if it is new; None writes nothing.
        rows: values by the names in COLUMNS. Values that are left out are empty.

    Raises:
        ValueError: The file has other columns.
    """
    if path is None:
        return
    about = {
        "benchmark": Path(sys.argv[0]).stem,
        **describe_machine(),
        "commit": commit(),
        "command": command_line(),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", newline="") as file:
        file.seek(0)
        present = next(csv.reader(file), None)
        if present not in (None, COLUMNS):
            raise ValueError(f"--out ({path}) has other columns than {COLUMNS}; name a new file.")
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        if present is None:
            writer.writeheader()
        writer.writerows({**about, **row} for row in rows)


def read_csv(path: Path, benchmark: str) -> list[dict[str, str]]:
    """Returns the rows of one benchmark in a table that `append_csv` wrote."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["benchmark"] == benchmark]


def command_line() -> str:
    """Returns the running command, such as "python benchmarks/update.py --rounds=5"."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def _line(result: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name}={value:,.2f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in result.items()
    )
