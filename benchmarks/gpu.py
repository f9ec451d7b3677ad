"""Compares towers with its peers on GPUs, within a time limit.

    python benchmarks/gpu.py --out=DIR

It measures the cases of gpu_plan.py, each in its own process, and writes gpu.csv, machine.json and
errors.txt to DIR. If you run it again, it continues with the remaining cases.
"""

import csv
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import machine
from benchmarks.gpu_plan import CONTENDERS, TRANSFERS, WORKLOADS, Case, make_plan
from benchmarks.process import ProcessError, TimeLimitError, run_process
from benchmarks.rounds import command_line

Row: TypeAlias = "dict[str, Any]"  # by COLUMNS; "" if a value is unknown
Table: TypeAlias = "dict[Case, Row]"

MEASURED, FAILED, NOT_REACHED = "measured", "failed", "not reached"
COLUMNS = (
    *Case._fields,
    "status",
    "error",
    "ms_per_step",
    "examples_per_second",
    "towers_ratio",
    "many_towers_ratio",
    "first_step_seconds",
    "build_seconds",
    "steps",
    "timed_seconds",
    "how",
    "down_mb",
    "up_mb",
    "down_ms",
    "up_ms",
    "down_gb_per_second",
    "up_gb_per_second",
    "share_of_step",
    "peak_memory_mb",
    "gpu_memory_mb",
    "devices",
    "driver",
    "cores",
    "processor",
    "python",
    "tensorflow",
    "keras",
    "command",
)
MIN_CASE_SECONDS = 12.0  # a case that starts TensorFlow and a GPU hardly takes less
MAX_ERROR_LENGTH = 4000  # characters of a failed case's output

_OUT = flags.DEFINE_string("out", None, "Directory to write to; created if missing.", required=True)
_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "The workloads to measure.")
_CONTENDERS = flags.DEFINE_list("contenders", list(CONTENDERS), "The contenders to measure.")
_DEVICES = flags.DEFINE_integer(
    "num_devices",
    None,
    "Number of GPUs that are compared with one GPU. If there are fewer, they "
    "are divided into logical GPUs. Default: 8; with --small 2.",
    lower_bound=2,
)
_SECONDS = flags.DEFINE_float("seconds", 480.0, "Time limit of all cases.", lower_bound=0.0)
_CASE_SECONDS = flags.DEFINE_float(
    "case_seconds", 90.0, "Time limit of one case with the start of its process.", lower_bound=0.0
)
_TIMED_SECONDS = flags.DEFINE_float(
    "timed_seconds",
    None,
    "Time for which each case's steps are timed. The warm-up before takes "
    "at least a quarter of it. Default: 4; with --small 0.2.",
    lower_bound=0.0,
)
_SMALL = flags.DEFINE_boolean(
    "small",
    False,
    "Small models and batches, to try the command on CPU devices: "
    "TOWERS_REHEARSE_GPUS=1 python benchmarks/gpu.py --small --workloads=mlp41m --out=DIR.",
)


def main(argv: list[str]) -> None:
    """Measures as many cases as there is time for; wrong flags end it with exit code 2."""
    del argv
    deadline = time.monotonic() + _SECONDS.value
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)  # the exception also ends the case's process
    out = Path(_OUT.value)
    try:
        for flag, known in ((_WORKLOADS, WORKLOADS), (_CONTENDERS, CONTENDERS)):
            for name in flag.value:
                if name not in known:
                    raise ValueError(f"--{flag.name} ({name}) must be one of {', '.join(known)}.")
        num_devices = _DEVICES.value or (2 if _SMALL.value else 8)
        plan = make_plan(num_devices, _WORKLOADS.value, _CONTENDERS.value, _SMALL.value)
        about = record_machine(out, _SMALL.value)
        table = read_table(out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    # A row for each case from the start shows what is missing, however the run ends.
    table = {**{case: make_row(about, case, NOT_REACHED) for case in plan}, **table}
    write_table(out, table)
    print(f"{len(plan)} cases on {machine.describe_devices(1, about['gpus'])}", flush=True)
    timed_seconds = _TIMED_SECONDS.value or (0.2 if _SMALL.value else 4.0)
    try:
        for line in measure_cases(out, table, about, deadline, _CASE_SECONDS.value, timed_seconds):
            print(line, flush=True)
    finally:
        missing = [case for case in plan if table[case]["status"] != MEASURED]
        print(f"{len(plan) - len(missing)} of {len(plan)} cases measured: {out}")
        for case in missing:
            row = table[case]
            print(f"{row['status']}: {case}  {row['error'][:120]}".rstrip())
        if any(table[case]["status"] == NOT_REACHED for case in missing):
            print("If you run it again, it continues with the remaining cases.")


def record_machine(out: Path, small: bool) -> dict[str, Any]:
    """Writes machine.json and returns its contents.

    Raises:
        ValueError: There is no GPU and no rehearsal, or the directory has figures of another
            machine or kind, which must not be compared with the new ones.
    """
    seen = run_process("machine.describe_tensorflow")
    if not seen["gpus"] and not machine.is_rehearsal():
        raise ValueError(
            "TensorFlow sees no GPU here (python train.py --devices says why). To rehearse on CPU "
            "devices, run TOWERS_REHEARSE_GPUS=1 python benchmarks/gpu.py --small --out=DIR."
        )
    kind = {"rehearsal": machine.is_rehearsal(), "small": small}
    about = {**seen, **machine.describe_machine(), **kind}
    path = out / "machine.json"
    before = json.loads(path.read_text()) if path.exists() else about
    different = [name for name, value in about.items() if before.get(name) != value]
    if different:
        raise ValueError(
            f"--out ({out}) has the figures of another machine or kind (machine.json differs in "
            f"{', '.join(different)}). Name another directory."
        )
    out.mkdir(parents=True, exist_ok=True)
    about |= {"nvidia_smi": machine.nvidia_smi(), "command": command_line()}
    path.write_text(json.dumps(about, indent=1) + "\n")
    return about


def measure_cases(
    out: Path,
    table: Table,
    about: Mapping[str, Any],
    deadline: float,
    case_seconds: float,
    timed_seconds: float,
) -> Iterator[str]:
    """Measures the cases "not reached"; after each case, writes the CSV and yields a line.

    Args:
        out: the directory.
        table: the rows of all cases; the results replace its rows.
        about: the machine, from `record_machine`.
        deadline: the end of the run, by `time.monotonic`.
        case_seconds: time limit of a case.
        timed_seconds: argument of `gpu_case.measure`.
    """
    waiting = [case for case, row in table.items() if row["status"] == NOT_REACHED]
    for index, case in enumerate(waiting, start=1):
        left = deadline - time.monotonic()
        if left < min(MIN_CASE_SECONDS, case_seconds):
            yield f"{max(left, 0.0):.0f} s left: not enough for another case"
            return
        limit = min(left, case_seconds)
        try:
            result = run_process(
                "gpu_case.measure",
                limit=limit,
                **case._asdict(),
                timed_seconds=timed_seconds,
                small=about["small"],
            )
            table[case] = make_row(about, case, MEASURED, result)
        except ProcessError as error:
            # A case that had less than its own limit, because the run ends, may succeed later.
            cut_off = isinstance(error, TimeLimitError) and limit < case_seconds
            status, prefix = (NOT_REACHED, "cut off: ") if cut_off else (FAILED, "")
            table[case] = make_row(about, case, status, {"error": prefix + error.reason})
            with (out / "errors.txt").open("a") as file:
                file.write(f"== {case}: {error.reason}\n{error.written[-MAX_ERROR_LENGTH:]}\n\n")
        write_table(out, table)
        yield f"{index} of {len(waiting)}  {case}  {describe_row(table[case])}"


def make_row(
    about: Mapping[str, Any], case: Case, status: str, result: Mapping[str, Any] = {}
) -> Row:
    """Returns the row of a case without its ratios."""
    row: Row = {**dict.fromkeys(COLUMNS, ""), **case._asdict(), "status": status, **result}
    gpus = about["nvidia_smi"] or [{}]
    row["devices"] = machine.describe_devices(case.num_devices, about["gpus"])
    if about["small"]:
        row["devices"] += ", small models: no measure of speed"
    row["driver"] = gpus[0].get("driver_version", "")
    row |= {name: about[name] for name in (*machine.describe_machine(), "command")}
    row["error"] = " ".join(row["error"].split())
    # Rounded now, so that the ratios are the same after the file is read again.
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in row.items()}


def describe_row(row: Row) -> str:
    """Returns the result of a case in a few words."""
    if row["status"] != MEASURED:
        return f"{row['status']}: {row['error'][:200]}"
    names = (
        ("down_gb_per_second", "up_gb_per_second")
        if row["contender"] == TRANSFERS
        else ("ms_per_step", "examples_per_second", "first_step_seconds")
    )
    return "  ".join(f"{name} {row[name]:,}" for name in names)


def read_table(out: Path) -> Table:
    """Returns the rows of earlier runs; {} without the file.

    Raises:
        ValueError: The file has other columns.
    """
    path = out / "gpu.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"--out: {path} has other columns; name another directory.")
        return {
            Case(
                row["workload"],
                row["precision"],
                int(row["batch_size"]),
                int(row["num_devices"]),
                row["contender"],
            ): row
            for row in reader
        }


def write_table(out: Path, table: Table) -> None:
    """Replaces gpu.csv with all rows and their ratios."""
    new = out / ".gpu.csv"
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for case, row in table.items():
            ratios = {k: f"{v:.5g}" if v else "" for k, v in compute_ratios(table, case).items()}
            writer.writerow(row | ratios)
    os.replace(new, out / "gpu.csv")


def compute_ratios(table: Table, case: Case) -> dict[str, float]:
    """Returns the ratios of a row to other rows; 0 if either is not measured.

    "towers_ratio" is the speed of towers on as many devices, divided by the row's speed.
    "many_towers_ratio", for one device, is the speed of towers on several devices at the same
    global batch, divided by the row's speed. "share_of_step", for transfers, is their time divided
    by the time of towers' step.
    """

    def number(other: Case, name: str) -> float:
        return float(table.get(other, {}).get(name) or 0.0)

    towers = case._replace(contender="towers")
    if case.contender == TRANSFERS:
        both, step = number(case, "down_ms") + number(case, "up_ms"), number(towers, "ms_per_step")
        return {"share_of_step": both / step if step else 0.0}
    speed = number(case, "examples_per_second")
    peers = {"towers_ratio": towers}
    if case.num_devices == 1:
        for other in table:
            if other.num_devices > 1 and other._replace(num_devices=1) == towers:
                peers["many_towers_ratio"] = other
    return {
        name: number(peer, "examples_per_second") / speed if speed else 0.0
        for name, peer in peers.items()
    }


def _exit(number: int, frame: Any) -> NoReturn:
    del frame
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    app.run(main)
