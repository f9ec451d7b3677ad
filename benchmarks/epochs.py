"""Times whole epochs of make_parallel(...).fit and of Keras' `fit`, on arrays and datasets.

    python benchmarks/epochs.py --workloads=cnn,gru_small,gru,text,transformer --rounds=3

Unlike throughput.py, it times calls of `fit` from start to end, and the autotuning of tf.data is
on.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.machine import peak_memory_mb

DEVICES = 2

_WORKLOADS = flags.DEFINE_list(
    "workloads", ["cnn", "gru_small", "gru", "text", "transformer"], "Names in workloads.py."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender.", lower_bound=1)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def measure(
    contender: str,
    workload: str,
    data: str,
    num_devices: int = DEVICES,
    num_batches: int = 30,
    warm_up_epochs: int = 1,
    epochs: int = 3,
    metrics: Sequence[str] = ("accuracy",),
    autotune: bool = True,
    profile_dir: str | None = None,
) -> dict[str, Any]:
    """Trains with `fit`; call it in a fresh process.

    Args:
        contender: "fit" (Keras) or "parallel" (make_parallel).
        workload: a name in workloads.py.
        data: "dataset" or "arrays".
        num_devices: devices of "parallel".
        num_batches: steps of an epoch.
        warm_up_epochs: epochs before the timing.
        epochs: timed epochs.
        metrics: argument of `compile`.
        autotune: whether tf.data tunes the dataset.
        profile_dir: directory for a profile of one more epoch.
    """
    import keras
    import tensorflow as tf

    import towers
    from benchmarks.contender import device_name, set_up_devices
    from benchmarks.workloads import WORKLOADS

    chosen = WORKLOADS[workload]()
    set_up_devices(contender, num_devices)
    keras.utils.set_random_seed(0)
    model = chosen.build()
    if contender == "parallel":
        model = towers.make_parallel(model, num_devices)
    model.compile(chosen.optimizer(), chosen.loss, metrics=list(metrics))
    x, y = chosen.data(num_batches)
    inputs = {"x": x, "y": y, "batch_size": chosen.batch_size}
    if data == "dataset":
        options = tf.data.Options()
        options.autotune.enabled = autotune
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(chosen.batch_size)
        inputs = {"x": batches.prefetch(2).with_options(options)}
    for _ in range(warm_up_epochs):
        model.fit(**inputs, verbose=0)
    start, cpu_start = time.perf_counter(), time.process_time()
    model.fit(**inputs, epochs=epochs, verbose=0)
    seconds = (time.perf_counter() - start) / epochs
    cpu_seconds = (time.process_time() - cpu_start) / epochs
    if profile_dir is not None:
        with tf.profiler.experimental.Profile(profile_dir):
            model.fit(**inputs, verbose=0)
    return {
        "examples_per_second": len(x) / seconds,
        "seconds_an_epoch": seconds,
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
        for data in ("dataset", "arrays"):
            print(workload, data, flush=True)
            shared = {"workload": workload, "data": data}
            contenders = {name: {"contender": name, **shared} for name in ("parallel", "fit")}
            results = rounds.run_rounds("epochs.measure", contenders, _ROUNDS.value)
            new = rounds.compare(
                results, "parallel", "examples_per_second", **shared, num_devices=DEVICES
            )
            rounds.append_csv(_OUT.value, new)
            rows += [{**row, "workload": f"{workload}, {data}"} for row in new]
    print(rounds.table(rows))


if __name__ == "__main__":
    app.run(main)
