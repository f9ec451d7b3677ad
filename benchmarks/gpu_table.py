"""The CSV of gpu.py: a row for each case of the plan, measured or not; and the ratios of them.

It is written whole after each case, so that whatever ends the run leaves what there is.
"""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.gpu_plan import TRIP, Case

Row: TypeAlias = "dict[str, Any]"  # by COLUMNS; "" where something is unknown
Table: TypeAlias = "dict[Case, Row]"

MEASURED, FAILED, NOT_REACHED = "measured", "failed", "not reached"
_OF_STEPS = (
    "ms_per_step", "examples_per_second", "towers_ratio", "many_towers_ratio",
    "first_step_seconds", "build_seconds", "steps", "timed_seconds", "how",
)
_OF_TRIP = (
    "down_mb", "up_mb", "down_ms", "up_ms", "down_gb_per_second", "up_gb_per_second",
    "share_of_step",
)
_ABOUT = (
    "peak_memory_mb", "gpu_memory_mb", "devices", "driver", "cores", "processor", "python",
    "tensorflow", "keras", "command",
)
COLUMNS = (*Case._fields, "status", "error", *_OF_STEPS, *_OF_TRIP, *_ABOUT)


def read(path: Path) -> Table:
    """The rows that earlier runs left there; {} without the file.

    Raises:
        ValueError: the file has other columns.
    """
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"--out: {path} has other columns; name another folder.")
        return {case_of(row): row for row in reader}


def write(path: Path, table: Table) -> None:
    """All rows, with their ratios, in place of what was there."""
    new = path.with_name(f".{path.name}")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for case, row in table.items():
            writer.writerow(rounded(row | ratios(table, case)))
    os.replace(new, path)


def case_of(row: Mapping[str, str]) -> Case:
    """The case of a row as the CSV reader gives it."""
    return Case(
        row["workload"], row["precision"], int(row["batch_size"]), int(row["num_devices"]),
        row["contender"],
    )


def ratios(table: Table, case: Case) -> Row:
    """The ratios of a row to other rows.

    "towers_ratio": towers' examples per second on as many devices over the row's; for one device,
    "many_towers_ratio": towers' on many devices over the row's, at the same global batch. For the
    trip over the CPU, "share_of_step": its time over that of towers' step.
    """
    towers = table.get(case._replace(contender="towers"), {})
    if case.contender == TRIP:
        both = _number(table[case], "down_ms"), _number(table[case], "up_ms")
        return {"share_of_step": _quotient(sum(both), _number(towers, "ms_per_step"))}
    own = _number(table[case], "examples_per_second")
    found = {"towers_ratio": _quotient(_number(towers, "examples_per_second"), own)}
    if case.num_devices == 1:
        many = [
            row for other, row in table.items()
            if other.num_devices > 1
            and other == case._replace(num_devices=other.num_devices, contender="towers")
        ]
        speed = _number(many[0], "examples_per_second") if many else 0.0
        found["many_towers_ratio"] = _quotient(speed, own)
    return found


def describe(table: Table, case: Case) -> str:
    """One line on what was measured."""
    row = table[case]
    if row["status"] != MEASURED:
        return f"{row['status']}{': ' if row['error'] else ''}{row['error'][:200]}"
    if case.contender == TRIP:
        return "  ".join(
            f"{way} {_number(row, way + '_mb'):,.1f} MB in {_number(row, way + '_ms'):,.2f} ms, "
            f"{_number(row, way + '_gb_per_second'):,.1f} GB/s"
            for way in ("down", "up")
        )
    each, speed, first = (
        _number(row, name) for name in ("ms_per_step", "examples_per_second", "first_step_seconds")
    )
    ratio = ratios(table, case)["towers_ratio"]
    compared = f"; towers / this {ratio:.2f}" if ratio and case.contender != "towers" else ""
    return f"{each:,.2f} ms, {speed:,.0f} examples/s{compared}; first step {first:.1f} s"


def rounded(row: Mapping[str, Any]) -> Row:
    """A row with five digits of each number."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def _number(row: Mapping[str, Any], name: str) -> float:
    """0 where there is none."""
    return float(row.get(name) or 0.0)


def _quotient(numerator: float, denominator: float) -> float | str:
    return numerator / denominator if numerator and denominator else ""
