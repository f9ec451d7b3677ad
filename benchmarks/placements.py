"""Compares placements of one step, in rounds: parameters copied to each GPU, layers in stages.

    python benchmarks/placements.py --rounds=3

On logical CPU devices that follow the GPUs' policy: what a placement costs in operations, copies
and memory, not what a GPU gains by it. Copies are compared with MirroredStrategy, stages with as
many towers that are not cut.
"""

import os
import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds  # noqa: E402  (found through the line above)

_WORKLOAD = flags.DEFINE_string("workload", "resnet50", "A name in workloads.py.")
_DEVICES = flags.DEFINE_integer("num_devices", 8, "Logical CPU devices.")
_STEPS = flags.DEFINE_integer("steps", 3, "Steps that are timed, after as many that are not.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender, in turn.", lower_bound=1)
_COMPARED = flags.DEFINE_list(
    "compared", ["copies:mirrored", "stages_2:towers", "stages_4:towers"],
    "Pairs of contenders, CONTENDER:PEER.",
)
_OUT = flags.DEFINE_string("out", "benchmarks/results/placements.csv", "CSV to append to.")

_MEASURES = {
    "copies": ("first_step_seconds", "examples_per_second", "peak_memory_mb"),
    "stages": ("first_step_seconds", "cpu_seconds_per_step"),
}


def main(argv: list[str]) -> None:
    """Measures, prints and appends to the CSV."""
    del argv
    os.environ["TOWERS_REHEARSE_GPUS"] = "1"  # of the contenders' processes
    shared = {
        "workload": _WORKLOAD.value, "num_devices": _DEVICES.value, "steps": _STEPS.value,
    }
    for pair in _COMPARED.value:
        ours, peer = pair.split(":")
        contenders = {name: {"contender": name, **shared} for name in (ours, peer)}
        results = rounds.run_rounds("contender", contenders, _ROUNDS.value)
        for measure in _MEASURES[ours.partition("_")[0]]:
            rows = rounds.compare(results, ours, measure, **shared)
            rounds.append_csv(Path(_OUT.value), rows)
            print(f"{measure}\n{rounds.table(rows)}", flush=True)


if __name__ == "__main__":
    app.run(main)
