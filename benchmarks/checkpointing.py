"""Measures the cost of checkpoints: `towers.train` with them against `towers.train` without.

    python benchmarks/checkpointing.py --checkpoint_every=100

Both sides write the first checkpoint and the last. TMPDIR names the disk of the run directories.
"""

import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.machine import peak_memory_mb

NEVER = 10**9  # steps
BATCH_SIZE = 128

_EVERY = flags.DEFINE_integer("checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1)
_MODEL = flags.DEFINE_string("model", "cnn", "Value of train.py's --model; trained on MNIST.")
_DEVICES = flags.DEFINE_integer(
    "num_devices", 2, "Number of GPUs, or of logical CPU devices without GPUs."
)
_STEPS = flags.DEFINE_integer(
    "steps",
    450,
    "Steps of a run. By default, 400 timed steps contain 4 checkpoints and no end of an epoch.",
    lower_bound=2,
)
_UNTIMED = flags.DEFINE_integer("untimed", 50, "Steps at the start that are not timed.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each side.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def train(
    model: str, num_devices: int, steps: int, untimed: int, checkpoint_every: int
) -> dict[str, Any]:
    """Trains with these flags of this command; call it in a fresh process."""
    import towers
    from benchmarks.clocks import Clock, throughput
    from benchmarks.contender import device_name

    clock = Clock()
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr):
        config = towers.TrainConfig(
            model=model,
            dataset="mnist",
            num_gpus=num_devices,
            batch_size=BATCH_SIZE,
            max_steps=steps,
            checkpoint_every=checkpoint_every,
            run_dir=f"{directory}/run",
        )
        towers.train(config, [clock])
    return {
        **throughput(clock.times[max(0, untimed - 1) :], BATCH_SIZE),
        "peak_memory_mb": peak_memory_mb(),
        "device": device_name(),
    }


def main(argv: list[str]) -> None:
    """Measures, prints the cost in percent and appends to the CSV."""
    del argv
    run = {
        "model": _MODEL.value,
        "num_devices": _DEVICES.value,
        "steps": _STEPS.value,
        "untimed": _UNTIMED.value,
    }
    every = f"every {_EVERY.value}"
    contenders = {
        every: {**run, "checkpoint_every": _EVERY.value},
        "none": {**run, "checkpoint_every": NEVER},
    }
    results = rounds.run_rounds("checkpointing.train", contenders, _ROUNDS.value)
    shared = {"workload": _MODEL.value, "num_devices": _DEVICES.value, "steps": _STEPS.value}
    rows = rounds.compare(results, every, "examples_per_second", **shared)
    rounds.append_csv(_OUT.value, rows)
    print(rounds.table(rows))
    cost = 1 - rows[0]["median_ratio"]
    print(f"checkpoints {every} steps cost {cost:.1%} (median of {_ROUNDS.value} rounds)")


if __name__ == "__main__":
    app.run(main)
