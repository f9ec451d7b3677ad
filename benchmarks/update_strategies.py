"""Measures the sum and update of a workload's gradients with a copy on each device, or slices.

    python benchmarks/update_strategies.py --rounds=3

Each case is a process with logical CPU devices that follow the GPUs' policy and share all cores. So
the times show how much work all devices do together, not how long a GPU takes.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TOWERS_REHEARSE_GPUS": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

from absl import app, flags  # noqa: E402  (found through the line above)

from benchmarks import rounds  # noqa: E402

_WORKLOAD = flags.DEFINE_string("workload", "mlp41m", "A name in workloads.py.")
_DEVICES = flags.DEFINE_list("num_devices", ["1", "2", "4", "8"], "Logical CPU devices.")
_STRATEGIES = flags.DEFINE_list("strategies", ["mirrored", "sharded"], "Strategies to compare.")
_STEPS = flags.DEFINE_integer("steps", 10, "Updates that are timed, after two that are not.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each case, in turn.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "benchmarks/results/update_strategies.csv", "CSV to append to.")
_CASE = flags.DEFINE_bool("case", False, "Measure one case in this process; print a JSON line.")


def measure(strategy: str, num_devices: int) -> dict[str, object]:
    """Returns the milliseconds of an update, and the megabytes of the slots on each device."""
    import keras
    import numpy as np
    import tensorflow as tf

    import towers
    from benchmarks.contender import peak_memory_mb
    from benchmarks.workloads import WORKLOADS

    towers.logical_cpus(num_devices)
    workload, devices = WORKLOADS[_WORKLOAD.value](), [f"/cpu:{i}" for i in range(num_devices)]
    keras.utils.set_random_seed(0)
    with tf.device(devices[0]):
        step = towers.TowerStep(
            workload.build(), workload.optimizer(), workload.loss, devices=devices,
            strategy=strategy,
        )
    tf.function(step.strategy.refresh)()
    step.strategy.trust(True)
    rng, values = np.random.default_rng(0), []
    for device in devices:
        with tf.device(device):
            arrays = [rng.random(v.shape, np.float32) for v in step.trainable_variables]
            values.append([tf.zeros([]), *map(tf.constant, arrays)])

    @tf.function(autograph=False)
    def update() -> tf.Tensor:
        with tf.device(devices[0]):
            return step.strategy.update(step.strategy.add_up(values, devices))[0]

    seconds, begun = [], 0.0
    for i in range(2 + _STEPS.value):
        if i == 2:
            begun = time.process_time()
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    spent = (time.process_time() - begun) / _STEPS.value
    slots = {v.shape for v in step.trainable_variables}
    held = 0
    for variable in step.optimizer.variables:
        if variable.shape in slots:
            part = getattr(variable.value, "slices", [variable.value])[0]
            held += part.dtype.size * int(np.prod(part.shape))
    return {
        "strategy": strategy, "num_devices": num_devices, "workload": _WORKLOAD.value,
        "update_ms": 1e3 * statistics.median(seconds[2:]), "cpu_ms": 1e3 * spent,
        "slots_mb_per_device": held / 1e6, "peak_memory_mb": peak_memory_mb(),
        "digest": towers.digest(step.model),
    }


def main(argv: list[str]) -> None:
    """Measures all cases in rounds, prints them and appends to the CSV."""
    if _CASE.value:
        print(json.dumps(measure(argv[1], int(argv[2]))), flush=True)
        os._exit(0)
    cases = list(itertools.product(_DEVICES.value, _STRATEGIES.value))
    for number in range(_ROUNDS.value):
        for num_devices, strategy in cases:
            command = [sys.executable, __file__, "--case", f"--workload={_WORKLOAD.value}",
                       f"--steps={_STEPS.value}", strategy, num_devices]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            row = {"round": number, **json.loads(done.stdout.splitlines()[-1])}
            rounds.append_csv(Path(_OUT.value), [row])
            print(row, flush=True)


if __name__ == "__main__":
    app.run(main)
