"""Times the sum and the update of a model's gradients on the CPU, with several threads and one.

    python benchmarks/update.py --workload=mlp41m --threads=2 --rounds=5

XLA compiles the update into one program and splits its loops by rows, one part per thread. The
command prints the bytes per second that pass through memory, which limit the speed. It fails if
the results are not bit-identical.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.machine import peak_memory_mb

_WORKLOAD = flags.DEFINE_string("workload", "mlp41m", "A name in workloads.py.")
_SUMS = flags.DEFINE_integer(
    "sums", 2, "Number of gradients to add: one per tower on CPUs, 1 with GPUs."
)
_THREADS = flags.DEFINE_integer("threads", 2, "Threads that are compared with 1.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each side.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def measure(workload: str, sums: int, threads: int, steps: int = 15) -> dict[str, Any]:
    """Times updates with random gradients; call it in a fresh process.

    Args:
        workload: a name in workloads.py, whose parameters are updated.
        sums: number of gradients to add.
        threads: TensorFlow's threads for one operation.
        steps: timed updates, after 2 warm-up updates.

    Returns:
        {"ms", "gb_per_second", "passes", "digest", ...}. "passes" counts how often the parameters'
        bytes pass through memory: once per gradient, and twice per variable, read and written.
        "digest" covers all updated variables.
    """
    import hashlib

    import numpy as np
    import tensorflow as tf

    from benchmarks.clocks import time_calls
    from benchmarks.workloads import WORKLOADS
    from towers.machine.devices import CPU
    from towers.step.averaging import add_tree, partial_sums

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    chosen = WORKLOADS[workload]()
    variables, optimizer = chosen.build().trainable_variables, chosen.optimizer()
    optimizer.build(variables)
    rng = np.random.default_rng(0)
    for variable in variables:
        variable.assign(rng.random(variable.shape, dtype=np.float32))
    gradients = [
        [tf.zeros([]), *(tf.constant(rng.random(v.shape, dtype=np.float32)) for v in variables)]
        for _ in range(sums)
    ]

    @tf.function(autograph=False, jit_compile=True)
    def update(tree: Any) -> tf.Tensor:
        loss, *added = add_tree(tree)
        optimizer.apply(added, variables)
        return loss

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        return update(partial_sums(gradients, ["/cpu:0"] * sums, CPU))

    time_calls(step, 2)
    seconds = time_calls(step, steps)
    values = [variable.numpy() for variable in [*variables, *optimizer.variables]]
    size = sum(variable.numpy().nbytes for variable in variables)
    slots = (sum(value.nbytes for value in values) - size) / size
    passes = sums + 2 * (1 + round(slots))
    return {
        "ms": 1e3 * seconds,
        "passes": passes,
        "gb_per_second": passes * size / seconds / 1e9,
        "digest": hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()[:12],
        "peak_memory_mb": peak_memory_mb(),
        "device": "CPU",
        "steps": steps,
    }


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV."""
    del argv
    shared = {"workload": _WORKLOAD.value, "sums": _SUMS.value}
    ours = f"{_THREADS.value} threads"
    contenders = {ours: {**shared, "threads": _THREADS.value}, "1 thread": {**shared, "threads": 1}}
    results = rounds.run_rounds("update.measure", contenders, _ROUNDS.value)
    digests = {result["digest"] for one_round in results for result in one_round.values()}
    if len(digests) > 1:
        raise SystemExit(f"error: the results differ between numbers of threads: {sorted(digests)}")
    rows = rounds.compare(
        results,
        ours,
        "ms",
        workload=_WORKLOAD.value,
        num_devices=_SUMS.value,
        steps=results[0][ours]["steps"],
        passes=results[0][ours]["passes"],
    )
    rounds.append_csv(_OUT.value, rows)
    print(rounds.table(rows))
    for name in contenders:
        rates = [one_round[name]["gb_per_second"] for one_round in results]
        print(f"{name}: {statistics.median(rates):.1f} GB/s")


if __name__ == "__main__":
    app.run(main)
