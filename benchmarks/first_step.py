"""Seconds from a built model to the end of its first step: towers against its peers, in rounds.

    python benchmarks/first_step.py --workload=resnet50 --peers=mirrored --num_devices=8
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds  # noqa: E402  (found through the line above)

_WORKLOAD = flags.DEFINE_string("workload", "resnet50", "A name in workloads.py.")
_CONTENDER = flags.DEFINE_string("contender", "towers", "The contender to compare with the peers.")
_PEERS = flags.DEFINE_list("peers", ["mirrored"], "Contenders to compare with.")
_DEVICES = flags.DEFINE_integer("num_devices", 8, "GPUs, or logical CPU devices without any.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender, in turn.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "benchmarks/results/first_step.csv", "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints and appends to the CSV."""
    del argv
    shared = {"workload": _WORKLOAD.value, "num_devices": _DEVICES.value, "steps": 0}
    contenders = {
        name: {"contender": name, **shared} for name in [_CONTENDER.value, *_PEERS.value]
    }
    results = rounds.run_rounds("contender", contenders, _ROUNDS.value)
    rows = rounds.compare(results, _CONTENDER.value, "first_step_seconds", **shared)
    rounds.append_csv(Path(_OUT.value), rows)
    print(rounds.table(rows))


if __name__ == "__main__":
    app.run(main)
