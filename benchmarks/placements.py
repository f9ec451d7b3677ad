"""Compares placements of a step in rounds: copies of the parameters, and layers in stages.

    python benchmarks/placements.py --rounds=3

Towers and copies are compared with MirroredStrategy, stages with as many uncut towers. The logical CPU devices
follow the policy for GPUs. So the figures show the operations, copies and memory of a placement,
but not how fast it is on GPUs.
"""

import os
import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds

_WORKLOAD = flags.DEFINE_string("workload", "resnet50", "A name in workloads.py.")
_DEVICES = flags.DEFINE_integer("num_devices", 8, "Logical CPU devices.")
_STEPS = flags.DEFINE_integer("steps", 3, "Timed steps, after as many warm-up steps.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender.", lower_bound=1)
_COMPARED = flags.DEFINE_list(
    "compared",
    ["towers:mirrored", "copies:mirrored", "stages_2:towers", "stages_4:towers"],
    "Pairs of contenders, CONTENDER:PEER.",
)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")

_MEASURES = {
    "towers": ("first_step_seconds",),
    "copies": ("first_step_seconds", "examples_per_second", "peak_memory_mb"),
    "stages": ("first_step_seconds", "cpu_seconds_per_step"),
}


def main(argv: list[str]) -> None:
    """Measures, prints and appends to the CSV."""
    del argv
    os.environ["TOWERS_REHEARSE_GPUS"] = "1"  # the contenders' processes inherit it
    shared = {
        "workload": _WORKLOAD.value,
        "num_devices": _DEVICES.value,
        "steps": _STEPS.value,
    }
    pairs = [pair.split(":") for pair in _COMPARED.value]
    names = dict.fromkeys(name for pair in pairs for name in pair)
    contenders = {name: {"contender": name, **shared} for name in names}
    results = rounds.run_rounds("contender.measure", contenders, _ROUNDS.value)
    for ours, peer in pairs:
        both = [{name: one[name] for name in (ours, peer)} for one in results]
        for measure in _MEASURES[ours.partition("_")[0]]:
            rows = rounds.compare(both, ours, measure, **shared)
            rounds.append_csv(_OUT.value, rows)
            print(f"{measure}\n{rounds.table(rows)}", flush=True)


if __name__ == "__main__":
    app.run(main)
