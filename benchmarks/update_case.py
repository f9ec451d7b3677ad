"""Measures the sum and update of a workload's gradients on the CPU; prints one JSON line.

`update.py` starts it; there is no need to call it by hand.
"""

import hashlib
import json
import os
import statistics
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402  (TensorFlow reads the variable above)
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402

from benchmarks.contender import peak_memory_mb  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402
from towers.step.averaging import partial_sums  # noqa: E402
from towers.step.update import update  # noqa: E402

_WORKLOAD = flags.DEFINE_enum("workload", "mlp41m", list(WORKLOADS), "Whose parameters.")
_SUMS = flags.DEFINE_integer("sums", 2, "Gradients to add: as many as towers on CPUs.")
_THREADS = flags.DEFINE_integer("threads", 1, "That TensorFlow has for one operation.")
_STEPS = flags.DEFINE_integer("steps", 15, "Timed updates.")


def main(argv: list[str]) -> None:
    """Prints {"ms", "gb_per_second", "passes", "digest", ...}.

    passes: over the parameters: each gradient, and each variable in and out. digest: of all that
    was updated.
    """
    del argv
    tf.config.threading.set_intra_op_parallelism_threads(_THREADS.value)
    workload = WORKLOADS[_WORKLOAD.value]()
    variables, optimizer = workload.build().trainable_variables, workload.optimizer()
    optimizer.build(variables)
    rng = np.random.default_rng(0)
    for variable in variables:
        variable.assign(rng.random(variable.shape, dtype=np.float32))
    towers = [
        [tf.zeros([]), *(tf.constant(rng.random(v.shape, dtype=np.float32)) for v in variables)]
        for _ in range(_SUMS.value)
    ]

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        tree = partial_sums(given, ["/cpu:0"] * _SUMS.value, add_on_devices=False)
        return update(tree, optimizer, variables)[0]

    given = [list(values) for values in towers]
    seconds = []
    for _ in range(2 + _STEPS.value):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds[2:])
    values = [variable.numpy() for variable in [*variables, *optimizer.variables]]
    size = sum(variable.numpy().nbytes for variable in variables)
    slots = (sum(value.nbytes for value in values) - size) / size
    passes = _SUMS.value + 2 * (1 + round(slots))
    print(json.dumps({
        "ms": 1e3 * took, "passes": passes, "gb_per_second": passes * size / took / 1e9,
        "digest": hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()[:12],
        "peak_memory_mb": peak_memory_mb(), "device": "CPU", "steps": _STEPS.value,
    }))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    app.run(main)
