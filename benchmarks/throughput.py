"""Examples per second at the same global batch: towers against each peer, in turn.

    python benchmarks/throughput.py --workload=cnn --peers=fit,mirrored,limit --num_devices=2
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import pairs  # noqa: E402  (found through the line above)

_WORKLOAD = flags.DEFINE_string("workload", "cnn", "A name in workloads.py.")
_CONTENDER = flags.DEFINE_string("contender", "towers", "Who is compared with the peers.")
_PEERS = flags.DEFINE_list("peers", ["fit", "mirrored", "limit"], "Contenders to compare with.")
_DEVICES = flags.DEFINE_integer("num_devices", 2, "GPUs, or logical CPU devices without any.")
_PAIRS = flags.DEFINE_integer("pairs", 3, "Runs of towers and peer in turn.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 60, "Timed steps of one run.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "benchmarks/results/throughput.csv", "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints and appends to the CSV."""
    del argv
    rows = []
    for peer in _PEERS.value:
        rows += pairs.compare(
            _CONTENDER.value, peer, "examples_per_second", _PAIRS.value,
            workload=_WORKLOAD.value, num_devices=_DEVICES.value, steps=_STEPS.value,
        )
    pairs.append_csv(Path(_OUT.value), rows)


if __name__ == "__main__":
    app.run(main)
