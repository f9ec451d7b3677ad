"""Seconds from a built model to the end of its first step: towers against a peer, in turn.

    python benchmarks/first_step.py --workload=resnet50 --peers=mirrored --num_devices=8
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import pairs  # noqa: E402  (found through the line above)

_WORKLOAD = flags.DEFINE_string("workload", "resnet50", "A name in workloads.py.")
_CONTENDER = flags.DEFINE_string("contender", "towers", "Who is compared with the peers.")
_PEERS = flags.DEFINE_list("peers", ["mirrored"], "Contenders to compare with.")
_DEVICES = flags.DEFINE_integer("num_devices", 8, "GPUs, or logical CPU devices without any.")
_PAIRS = flags.DEFINE_integer("pairs", 3, "Runs of towers and peer in turn.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "benchmarks/results/first_step.csv", "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints and appends to the CSV."""
    del argv
    rows = []
    for peer in _PEERS.value:
        rows += pairs.compare(
            _CONTENDER.value, peer, "first_step_seconds", _PAIRS.value,
            workload=_WORKLOAD.value, num_devices=_DEVICES.value, steps=0,
        )
    pairs.append_csv(Path(_OUT.value), rows)


if __name__ == "__main__":
    app.run(main)
