"""The cost of checkpoints: the throughput of `towers.train` with them over that without, in rounds.

    python benchmarks/checkpointing.py --checkpoint_every=100

Each run is a fresh process of `training.py`; both sides write the first checkpoint and the last.
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds  # noqa: E402  (found through the line above)

NEVER = 10**9  # steps

_EVERY = flags.DEFINE_integer("checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1)
_MODEL = flags.DEFINE_string("model", "cnn", "As train.py takes it; on MNIST.")
_DEVICES = flags.DEFINE_integer("num_devices", 2, "GPUs, or logical CPU devices without any.")
_STEPS = flags.DEFINE_integer(
    "steps", 450, "Steps of a run. The default, with --untimed, holds 4 of 400 steps' checkpoints, "
    "and no end of an epoch.", lower_bound=2,
)
_UNTIMED = flags.DEFINE_integer("untimed", 50, "Steps at the start that are not timed.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each side, in turn.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "benchmarks/results/checkpointing.csv", "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints the cost in percent and appends to the CSV."""
    del argv
    run = {"model": _MODEL.value, "num_devices": _DEVICES.value, "steps": _STEPS.value,
           "untimed": _UNTIMED.value}
    every = f"every {_EVERY.value}"
    contenders = {
        every: {**run, "checkpoint_every": _EVERY.value},
        "none": {**run, "checkpoint_every": NEVER},
    }
    results = rounds.run_rounds("training", contenders, _ROUNDS.value)
    shared = {"workload": _MODEL.value, "num_devices": _DEVICES.value, "steps": _STEPS.value}
    rows = rounds.compare(results, every, "examples_per_second", **shared)
    rounds.append_csv(Path(_OUT.value), rows)
    print(rounds.table(rows))
    cost = 1 - rows[0]["median_ratio"]
    print(f"checkpoints {every} steps cost {cost:.1%} (median of {_ROUNDS.value} rounds)")


if __name__ == "__main__":
    app.run(main)
