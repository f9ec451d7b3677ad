"""Runs contenders in turn, each in a fresh process, and compares them round by round.

    round 0: towers, fit, mirrored, ...    round 1: towers, fit, mirrored, ...    round 2: ...

A machine's speed drifts; the ratio of two runs of the same round hardly does.
"""

import csv
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.process import run_process


def run_rounds(
    module: str, contenders: Mapping[str, Mapping[str, Any]], num_rounds: int
) -> list[dict[str, dict[str, Any]]]:
    """Every contender once a round, in the order given; backwards in every other round.

    A peer that fails, because it cannot train such a model, is left out from then on.

    Args:
        module: a module of this package, which runs each contender.
        contenders: the flags of each contender's process; the first is the one that is compared.
        num_rounds: how often each runs.

    Returns:
        What each contender measured, in each round.

    Raises:
        RuntimeError: the first contender failed.
    """
    ours, *peers = contenders
    rounds = []
    for index in range(num_rounds):
        results = {}
        for name in [ours, *peers][:: -1 if index % 2 else 1]:
            try:
                results[name] = run_process(module, **contenders[name])
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
    """A contender against each of the others.

    Args:
        rounds: the result of `run_rounds`. A peer counts if all rounds have it.
        contender: one of their names.
        measure: the column to compare, such as "examples_per_second".
        shared: columns that all rows have in common.

    Returns:
        A row for each round and peer: the measure of both, contender / peer, and that ratio's
        median over the rounds.
    """
    rows = []
    for peer in rounds[0]:
        if peer == contender or not all(peer in results for results in rounds):
            continue
        ratios = [results[contender][measure] / results[peer][measure] for results in rounds]
        for index, results in enumerate(rounds):
            ours, other = results[contender], results[peer]
            rows.append({
                **shared, "contender": contender, "peer": peer, "round": index,
                "measure": measure, "value": round(ours[measure], 3),
                "peer_value": round(other[measure], 3), "ratio": round(ratios[index], 3),
                "peak_memory_mb": round(ours["peak_memory_mb"]),
                "peer_peak_memory_mb": round(other["peak_memory_mb"]),
                "median_ratio": round(statistics.median(ratios), 3), "device": ours["device"],
            })
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The medians, one line for each workload, device count and peer."""
    lines = [f"{'workload':<14}{'devices':>8}{'contender':>12}{'median':>12}{'peer':>12}"
             f"{'median':>12}{'ratio':>8}"]
    for group in groups(rows):
        first = group[0]
        ours, other = (statistics.median(float(row[key]) for row in group)
                       for key in ("value", "peer_value"))
        lines.append(
            f"{first['workload']:<14}{first['num_devices']:>8}{first['contender']:>12}"
            f"{ours:>12,.1f}{first['peer']:>12}{other:>12,.1f}{float(first['median_ratio']):>8.2f}"
        )
    return "\n".join(lines)


def groups(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of each comparison; of one that was repeated, the last time's alone."""
    found: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(str(row[name]) for name in ("workload", "num_devices", "contender", "peer"))
        if int(row["round"]) == 0:
            found[key] = []
        found.setdefault(key, []).append(row)
    return list(found.values())


def append_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows, with the machine and the command that made them; writes a header if new.

    Raises:
        ValueError: the file has other columns.
    """
    command = "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    rows = [{**row, **machine(), "command": command} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = list(rows[0])
    if path.exists():
        with path.open(newline="") as file:
            present = next(csv.reader(file), [])
        if present != columns:
            raise ValueError(f"--out ({path}) has other columns than {columns}; name a new file.")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def _line(result: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{name}={value:,.2f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in result.items()
    )
