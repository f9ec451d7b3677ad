"""Times the sum and the update of gradients by strategy: a copy on each device, or slices.

    python benchmarks/update_strategies.py --rounds=3

The logical CPU devices follow the policy for GPUs and share all cores. So the times show how much
work all devices do together, not how long a GPU takes.
"""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds  # noqa: E402  (found through the line above)
from benchmarks.machine import peak_memory_mb  # noqa: E402
from benchmarks.process import run_process  # noqa: E402

_WORKLOAD = flags.DEFINE_string("workload", "mlp41m", "A name in workloads.py.")
_DEVICES = flags.DEFINE_list("num_devices", ["1", "2", "4", "8"], "Logical CPU devices.")
_STRATEGIES = flags.DEFINE_list("strategies", ["mirrored", "sharded"], "Strategies to compare.")
_STEPS = flags.DEFINE_integer("steps", 10, "Timed updates, after 2 warm-up updates.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each case.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "benchmarks/results/update_strategies.csv", "CSV to append to.")


def measure(strategy: str, num_devices: int, workload: str, steps: int) -> dict[str, Any]:
    """Times updates with random gradients; call it in a fresh process.

    Returns:
        A row: the milliseconds of an update, and the megabytes of the slots on each device.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import towers
    from benchmarks.clocks import time_calls
    from benchmarks.workloads import WORKLOADS

    towers.logical_cpus(num_devices)
    chosen, devices = WORKLOADS[workload](), [f"/cpu:{i}" for i in range(num_devices)]
    keras.utils.set_random_seed(0)
    with tf.device(devices[0]):
        step = towers.TowerStep(
            chosen.build(), chosen.optimizer(), chosen.loss, devices=devices, strategy=strategy,
        )
    tf.function(step.strategy.refresh)()
    step.strategy.trust(True)
    rng, gradients = np.random.default_rng(0), []
    for device in devices:
        with tf.device(device):
            arrays = [rng.random(v.shape, np.float32) for v in step.trainable_variables]
            gradients.append([tf.zeros([]), *map(tf.constant, arrays)])

    @tf.function(autograph=False)
    def update() -> tf.Tensor:
        with tf.device(devices[0]):
            return step.strategy.update(step.strategy.add_up(gradients, devices))[0]

    time_calls(update, 2)
    cpu_start = time.process_time()
    seconds = time_calls(update, steps)
    cpu_seconds = (time.process_time() - cpu_start) / steps
    shapes = {v.shape for v in step.trainable_variables}
    slot_bytes = 0
    for variable in step.optimizer.variables:
        if variable.shape in shapes:
            part = getattr(variable.value, "slices", [variable.value])[0]
            slot_bytes += part.dtype.size * int(np.prod(part.shape))
    return {
        "strategy": strategy, "num_devices": num_devices, "workload": workload,
        "update_ms": 1e3 * seconds, "cpu_ms": 1e3 * cpu_seconds,
        "slots_mb_per_device": slot_bytes / 1e6, "peak_memory_mb": peak_memory_mb(),
        "digest": towers.digest(step.model),
    }


def main(argv: list[str]) -> None:
    """Measures all cases in rounds, prints them and appends to the CSV."""
    del argv
    os.environ["TOWERS_REHEARSE_GPUS"] = "1"  # the cases' processes inherit it
    cases = list(itertools.product(map(int, _DEVICES.value), _STRATEGIES.value))
    for index in range(_ROUNDS.value):
        for num_devices, strategy in cases:
            row = {"round": index, **run_process(
                "update_strategies.measure", strategy=strategy, num_devices=num_devices,
                workload=_WORKLOAD.value, steps=_STEPS.value)}
            rounds.append_csv(_OUT.value, [row])
            print(row, flush=True)


if __name__ == "__main__":
    app.run(main)
