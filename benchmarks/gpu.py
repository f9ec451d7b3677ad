"""Towers and their peers on GPUs: one command, which ends in time and keeps what it has.

    python benchmarks/gpu.py --out=DIR

Measures the cases of `gpu_plan.py`, each in its own process, and writes gpu.csv, gpu.png,
machine.json and errors.txt to DIR. If you run it again, it continues with the remaining cases.
"""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_chart, gpu_run, machine  # noqa: E402  (found through the line above)
from benchmarks.budget import Budget  # noqa: E402
from benchmarks.gpu_plan import CONTENDERS, WORKLOADS, Case, plan, shortened  # noqa: E402
from benchmarks.gpu_table import FAILED, MEASURED, NOT_REACHED, Table  # noqa: E402
from benchmarks.process import run_process  # noqa: E402

_OUT = flags.DEFINE_string("out", None, "Folder to write to; made if absent.", required=True)
_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "The workloads to measure.")
_CONTENDERS = flags.DEFINE_list("contenders", list(CONTENDERS), "The contenders to measure.")
_DEVICES = flags.DEFINE_integer(
    "num_devices", None, "How many GPUs are compared beside one; logical ones, if there are fewer. "
    "Default: 8; with --small 2.", lower_bound=2,
)
_SECONDS = flags.DEFINE_float("seconds", 480.0, "For all of it.", lower_bound=0.0)
_CASE_SECONDS = flags.DEFINE_float(
    "case_seconds", 90.0, "For one case, its process' start included.", lower_bound=0.0
)
_TIMED_SECONDS = flags.DEFINE_float(
    "timed_seconds", None, "In which each case's steps are timed, after at least a quarter of it "
    "to warm up. Default: 4; with --small 0.2.", lower_bound=0.0,
)
_SMALL = flags.DEFINE_boolean(
    "small", False, "Tiny models and batches, to try all of it on CPU devices: "
    "TOWERS_REHEARSE_GPUS=1 python benchmarks/gpu.py --small --out=DIR."
)
_WHOLE_PLAN = flags.DEFINE_boolean(
    "whole_plan", None, "Every case. Default: yes; with --small as many as show every workload and "
    "every contender once.",
)

_CHART_SECONDS = 5.0  # at the end


def main(argv: list[str]) -> None:
    """Measures what there is time for; exit code 2 for the user's mistakes."""
    del argv
    budget = Budget(_SECONDS.value - _CHART_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)  # as an exception, which ends the case's process
    try:
        run = make_run()
        table = gpu_run.begin(run)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(run.cases)} cases on {machine.describe_devices(1, run.about['gpus'])}", flush=True)
    try:
        for line in gpu_run.measure(run, table, budget):
            print(line, flush=True)
        gpu_chart.draw(run.out / gpu_run.CSV, run.out / gpu_run.CHART)
    finally:
        print("\n".join(closing(table, run.cases, run.out)))


def make_run() -> gpu_run.Run:
    """The run that the flags ask for, on this machine.

    Raises:
        ValueError: a name is none of the plan's; no GPU; the folder holds other figures.
    """
    for flag, known in ((_WORKLOADS, WORKLOADS), (_CONTENDERS, CONTENDERS)):
        for name in flag.value:
            if name not in known:
                raise ValueError(f"--{flag.name} ({name}) must be of {', '.join(known)}.")
    small = _SMALL.value
    cases = plan(_DEVICES.value or (2 if small else 8), _WORKLOADS.value, _CONTENDERS.value, small)
    if not (_WHOLE_PLAN.value or _WHOLE_PLAN.value is None and not small):
        cases = shortened(cases)
    timed = _TIMED_SECONDS.value or (0.2 if small else 4.0)
    out = Path(_OUT.value)
    about = describe_machine(out, small)
    given = {"timed_seconds": timed, "small": small}
    return gpu_run.Run(out, cases, _CASE_SECONDS.value, given, about)


def describe_machine(out: Path, small: bool) -> dict[str, Any]:
    """Writes machine.json, the machine that all cases are measured on.

    Args:
        out: the folder.
        small: whether the models are.

    Raises:
        ValueError: there is no GPU, and no rehearsal; or the folder holds figures of another
            machine, which must not be compared with this one's.
    """
    seen = run_process("machine")
    if not seen["gpus"] and not machine.is_rehearsal():
        raise ValueError(
            "TensorFlow sees no GPU here (python train.py --devices says why). To rehearse on CPU "
            "devices: TOWERS_REHEARSE_GPUS=1 python benchmarks/gpu.py --small --out=DIR."
        )
    kind = {"rehearsal": machine.is_rehearsal(), "small": small}
    about = {**seen, **machine.machine(), **kind}
    path = out / "machine.json"
    before = json.loads(path.read_text()) if path.exists() else about
    different = [name for name, value in about.items() if before.get(name) != value]
    if different:
        raise ValueError(
            f"--out ({out}) holds another machine's or kind's figures (machine.json differs in "
            f"{', '.join(different)}). Name another folder."
        )
    out.mkdir(parents=True, exist_ok=True)
    command = "python " + " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about |= {"nvidia_smi": machine.nvidia_smi(), "command": command}
    path.write_text(json.dumps(about, indent=1) + "\n")
    return about


def closing(table: Table, cases: Sequence[Case], out: Path) -> list[str]:
    """The last lines: the measured part of the plan; cases that failed or were not reached."""
    by_status: dict[str, list[Case]] = {MEASURED: [], FAILED: [], NOT_REACHED: []}
    for case in cases:
        by_status[table[case]["status"]].append(case)
    lines = [f"{len(by_status[MEASURED])} of {len(cases)} cases measured: {out}"]
    for status in (FAILED, NOT_REACHED):
        lines += [
            f"{status}: {case}  {table[case]['error'][:120]}".rstrip() for case in by_status[status]
        ]
    if by_status[NOT_REACHED]:
        lines.append("If you run it again, it continues with the remaining cases.")
    return lines


def _exit(number: int, frame: Any) -> NoReturn:
    del frame
    print(f"ended by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    app.run(main)
