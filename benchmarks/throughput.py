"""Compares towers with its peers at the same global batch, in rounds.

    python benchmarks/throughput.py --workloads=cnn,notebook_cnn,mlp41m,gru --rounds=3
    python benchmarks/throughput.py --workloads=resnet50 --peers=mirrored --num_devices=8 --steps=0

The first command compares examples per second, the second one the seconds of the first step.
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds

_WORKLOADS = flags.DEFINE_list(
    "workloads", ["cnn", "notebook_cnn", "mlp41m", "gru"], "Names in workloads.py."
)
_CONTENDER = flags.DEFINE_string("contender", "towers", "The contender to compare with the peers.")
_PEERS = flags.DEFINE_list(
    "peers", ["fit", "mirrored", "limit"], "Contenders of contender.py to compare with."
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
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints and appends to the CSV after each workload."""
    del argv
    measure = "first_step_seconds" if _STEPS.value == 0 else "examples_per_second"
    rows = []
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
            rounds.append_csv(_OUT.value, new)
        rows += new
    print(rounds.table(rows))


if __name__ == "__main__":
    app.run(main)
