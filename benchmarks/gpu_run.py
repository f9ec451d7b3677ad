"""Runs the cases of a plan one after the other, as far as the time goes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import gpu_table, machine
from benchmarks.budget import Budget, case_limit
from benchmarks.gpu_plan import Case
from benchmarks.gpu_table import FAILED, MEASURED, NOT_REACHED, Row, Table
from benchmarks.process import ProcessError, TookTooLongError, run_process

CSV, CHART, ERRORS = "gpu.csv", "gpu.png", "errors.txt"
_LEAST_SECONDS = 12.0  # TensorFlow's start, a GPU's, a first step, warm-up, timing: hardly less
_KEPT = 4000  # characters of what a failed case wrote


class Run(NamedTuple):
    """The options that all cases have in common.

    out: the folder. cases: the plan. case_seconds: each one's limit.
    flags: more flags of gpu_case.py than the case itself has.
    about: the machine, from `gpu.describe_machine`.
    """

    out: Path
    cases: Sequence[Case]
    case_seconds: float
    flags: Mapping[str, Any]
    about: Mapping[str, Any]


def begin(run: Run) -> Table:
    """The folder's rows, and a row "not reached" for every other case of the plan.

    So the CSV says what is missing, whatever ends the run.

    Raises:
        ValueError: the folder's CSV has other columns.
    """
    table = gpu_table.read(run.out / CSV)
    for case in run.cases:
        if case not in table:
            table[case] = _row(run, case, NOT_REACHED)
    gpu_table.write(run.out / CSV, table)
    return table


def measure(run: Run, table: Table, budget: Budget) -> Iterator[str]:
    """Measures what has no result yet; a line after each case, and the CSV with its row."""
    waiting = [case for case in run.cases if table[case]["status"] == NOT_REACHED]
    for index, case in enumerate(waiting, start=1):
        left = budget.left()
        limit = case_limit(left, run.case_seconds, _LEAST_SECONDS)
        if limit is None:
            yield f"{max(left, 0.0):.0f} s left: too few for another case"
            return
        table[case] = run_case(run, case, limit)
        gpu_table.write(run.out / CSV, table)
        took = left - budget.left()
        yield (f"[{max(budget.left(), 0.0):3.0f} s left] {index} of {len(waiting)}, {took:.0f} s  "
               f"{case}  {gpu_table.describe(table, case)}")


def run_case(run: Run, case: Case, limit: float) -> Row:
    """Runs one case in its own process, which is killed at its limit.

    A case that was cut off because the time for all of them was up has not been reached.
    """
    try:
        result = run_process("gpu_case", limit=limit, **case._asdict(), **run.flags)
        return _row(run, case, MEASURED, result)
    except ProcessError as error:
        cut_off = isinstance(error, TookTooLongError) and limit < run.case_seconds
        status, reason = (NOT_REACHED, "cut off: ") if cut_off else (FAILED, "")
        with (run.out / ERRORS).open("a") as file:
            file.write(f"== {case}: {error.reason}\n{error.written[-_KEPT:]}\n\n")
        return _row(run, case, status, error=reason + error.reason)


def _row(run: Run, case: Case, status: str, result: Mapping[str, Any] = {}, error: str = "") -> Row:
    about = run.about
    smi = about["nvidia_smi"] or [{}]
    devices = machine.describe_devices(case.num_devices, about["gpus"])
    if about["small"]:
        devices += ", small models: no measure of speed"
    return {
        **case._asdict(), "status": status, "error": " ".join(error.split()),
        **gpu_table.rounded(result),  # at once: ratios must be the same once the file is read again
        "devices": devices, "driver": smi[0].get("driver_version", ""),
        **{name: about[name] for name in (*machine.machine(), "command")},
    }
