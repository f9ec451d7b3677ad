"""Compares towers with its peers at the same global batch, in rounds.

    python benchmarks/throughput.py --workloads=cnn,notebook_cnn,mlp41m,gru --rounds=3
    python benchmarks/throughput.py --workloads=resnet50 --peers=mirrored --num_devices=8 --steps=0

The first command compares examples per second and draws a chart of the complete CSV. With
--steps=0, the seconds of the first step are compared instead, and first_step.csv is the CSV.
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import chart, rounds  # noqa: E402  (found through the line above)

_WORKLOADS = flags.DEFINE_list(
    "workloads", ["cnn", "notebook_cnn", "mlp41m", "gru"], "Names in workloads.py."
)
_CONTENDER = flags.DEFINE_string("contender", "towers", "The contender to compare with the peers.")
_PEERS = flags.DEFINE_list(
    "peers", ["fit", "mirrored", "central", "limit"], "Contenders of contender.py to compare with."
)
_DEVICES = flags.DEFINE_integer(
    "num_devices",
    None,
    "Number of GPUs, or of logical CPU devices without GPUs. fit uses one. "
    "Default: all GPUs, or towers_per_core of the workload times the number of cores.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps",
    None,
    "Timed steps of a run. 0: compare the first step. Default: the workload's "
    "number, which takes 4 to 8 seconds on 2 cores; use more on GPUs.",
    lower_bound=0,
)
_OUT = flags.DEFINE_string(
    "out", None, "CSV to append to. Default: benchmarks/results/throughput.csv, or first_step.csv."
)
_CHART = flags.DEFINE_string(
    "chart",
    None,
    "PNG of the examples per second in the complete CSV. Default: "
    "docs/images/throughput.png; with --out=FILE.csv, FILE.png.",
)


def main(argv: list[str]) -> None:
    """Measures, prints and appends to the CSV after each workload, then draws the chart."""
    del argv
    is_first_step = _STEPS.value == 0
    measure = "first_step_seconds" if is_first_step else "examples_per_second"
    name = "first_step" if is_first_step else "throughput"
    out, rows = _OUT.value or f"benchmarks/results/{name}.csv", []
    for workload in _WORKLOADS.value:
        print(workload, flush=True)
        contenders = {
            name: {
                "contender": name,
                "workload": workload,
                "num_devices": _DEVICES.value,
                "steps": _STEPS.value,
            }
            for name in [_CONTENDER.value, *_PEERS.value]
        }
        results = rounds.run_rounds("contender.measure", contenders, _ROUNDS.value)
        ours = results[0][_CONTENDER.value]
        shared = {name: ours[name] for name in ("num_devices", "steps")}
        new = rounds.compare(results, _CONTENDER.value, measure, workload=workload, **shared)
        if new:
            rounds.append_csv(out, new)
        rows += new
    print(rounds.table(rows))
    if rows and not is_first_step:
        default = Path(out).with_suffix(".png") if _OUT.value else "docs/images/throughput.png"
        chart.draw(Path(out), Path(_CHART.value or default))


if __name__ == "__main__":
    app.run(main)
