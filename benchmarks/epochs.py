"""Times whole epochs of make_parallel(...).fit and of Keras' `fit` on a dataset.

    python benchmarks/epochs.py --workloads=cnn,gru_small,text,transformer --rounds=3

Unlike throughput.py, it times calls of `fit` from start to end, and the autotuning of tf.data is
on.
"""

import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.machine import peak_memory_mb

DEVICES = 2

_WORKLOADS = flags.DEFINE_list(
    "workloads", ["cnn", "gru_small", "text", "transformer"], "Names in workloads.py."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def measure(
    contender: str, workload: str, num_batches: int = 30, warm_up_epochs: int = 1, epochs: int = 3
) -> dict[str, Any]:
    """Trains with `fit`; call it in a fresh process.

    Args:
        contender: "fit" (Keras) or "parallel" (make_parallel).
        workload: a name in workloads.py.
        num_batches: steps of an epoch.
        warm_up_epochs: epochs before the timing.
        epochs: timed epochs.
    """
    import keras
    import tensorflow as tf

    import towers
    from benchmarks.contender import device_name, set_up_devices
    from benchmarks.workloads import WORKLOADS

    chosen = WORKLOADS[workload]()
    set_up_devices(contender, DEVICES)
    keras.utils.set_random_seed(0)
    model = chosen.build()
    if contender == "parallel":
        model = towers.make_parallel(model, DEVICES)
    model.compile(chosen.optimizer(), chosen.loss, metrics=["accuracy"])
    examples = chosen.data(num_batches)
    batches = tf.data.Dataset.from_tensor_slices(examples).batch(chosen.batch_size).prefetch(2)
    model.fit(batches, epochs=warm_up_epochs, verbose=0)
    start, cpu_start = time.perf_counter(), time.process_time()
    model.fit(batches, epochs=epochs, verbose=0)
    seconds = (time.perf_counter() - start) / epochs
    cpu_seconds = (time.process_time() - cpu_start) / epochs
    return {
        "examples_per_second": chosen.batch_size * num_batches / seconds,
        "ms_per_step": 1e3 * seconds / num_batches,
        "cpu_ms_per_step": 1e3 * cpu_seconds / num_batches,
        "peak_memory_mb": peak_memory_mb(),
        "device": device_name(),
    }


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV after each workload."""
    del argv
    rows = []
    for workload in _WORKLOADS.value:
        print(workload, flush=True)
        contenders = {
            name: {"contender": name, "workload": workload} for name in ("parallel", "fit")
        }
        results = rounds.run_rounds("epochs.measure", contenders, _ROUNDS.value)
        new = rounds.compare(
            results, "parallel", "examples_per_second", workload=workload, num_devices=DEVICES
        )
        rounds.append_csv(_OUT.value, new)
        rows += new
    print(rounds.table(rows))


if __name__ == "__main__":
    app.run(main)
