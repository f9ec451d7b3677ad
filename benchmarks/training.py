"""Runs `towers.train` in its own process; prints its steady throughput as a JSON line.

`checkpointing.py` starts it; there is no need to call it by hand. The run directory is a temporary
one: TMPDIR names the disk.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from absl import app, flags  # noqa: E402  (TensorFlow reads the variable above)

import towers  # noqa: E402
from benchmarks.clocks import Clock  # noqa: E402
from benchmarks.contender import device_name, peak_memory_mb  # noqa: E402


def define_flags() -> None:
    """The flags of this process."""
    flags.DEFINE_string("model", "cnn", "As train.py takes it; on MNIST.")
    flags.DEFINE_integer("num_devices", 2, "GPUs, or logical CPU devices without any.")
    flags.DEFINE_integer("steps", 450, "Updates.")
    flags.DEFINE_integer("untimed", 50, "Updates at the start that are not timed.")
    flags.DEFINE_integer("checkpoint_every", 100, "Updates from one checkpoint to the next.")
    flags.DEFINE_integer("batch_size", 128, "Global batch.")


def step_times(config: towers.TrainConfig) -> list[float]:
    """Trains; returns when each step ended, in seconds."""
    clock = Clock()
    towers.train(config, [clock])
    return clock.times


def throughput(times: Sequence[float], batch_size: int, untimed: int) -> dict[str, float]:
    """From the end of step `untimed` to the end of the last, whatever lies between."""
    times = times[max(0, untimed - 1):]
    seconds = times[-1] - times[0]
    examples = (len(times) - 1) * batch_size
    return {"examples_per_second": examples / seconds, "timed_seconds": seconds}


def main(argv: list[str]) -> None:
    """Prints {"examples_per_second", "timed_seconds", "peak_memory_mb", "device"}."""
    del argv
    given = flags.FLAGS
    with tempfile.TemporaryDirectory() as directory, redirect_stdout(sys.stderr):
        config = towers.TrainConfig(
            model=given.model, dataset="mnist", num_gpus=given.num_devices,
            batch_size=given.batch_size, max_steps=given.steps,
            checkpoint_every=given.checkpoint_every, run_dir=f"{directory}/run",
        )
        result = throughput(step_times(config), given.batch_size, given.untimed)
    about = {"peak_memory_mb": peak_memory_mb(), "device": device_name()}
    print(json.dumps(result | about))


if __name__ == "__main__":
    define_flags()
    app.run(main)
