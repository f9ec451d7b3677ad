"""Whole epochs of `fit` on the data that users pass: make_parallel(...).fit against Keras' fit.

    python benchmarks/epochs.py --workloads=cnn,gru_small,gru,text --rounds=3

Unlike `throughput.py`, it times calls of `fit` from begin to end, and leaves tf.data's autotuning
on. Each round runs both contenders for both kinds of data, each in a fresh process.
"""

import json
import os
import sys
import time
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds  # noqa: E402  (found through the line above)

CONTENDERS, DATA, BATCHES, EPOCHS, DEVICES = ("parallel", "fit"), ("dataset", "arrays"), 30, 3, 2


def measure(contender: str, name: str, data: str) -> None:
    """Trains one epoch, then `EPOCHS`; prints {"examples_per_second", "peak_memory_mb", ...}."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import tensorflow as tf

    import towers
    from benchmarks.contender import METRICS, device_name, peak_memory_mb, set_up
    from benchmarks.workloads import WORKLOADS

    workload = WORKLOADS[name]()
    set_up(contender, DEVICES)
    keras.utils.set_random_seed(0)
    model = workload.build()
    if contender == "parallel":
        model = towers.make_parallel(model, DEVICES)
    model.compile(workload.optimizer(), workload.loss, metrics=METRICS)
    x, y = workload.data(BATCHES)
    options = {"x": x, "y": y, "batch_size": workload.batch_size}
    if data == "dataset":
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(workload.batch_size)
        options = {"x": batches.prefetch(2)}
    model.fit(**options, verbose=0)
    begin = time.perf_counter()
    model.fit(**options, epochs=EPOCHS, verbose=0)
    seconds = (time.perf_counter() - begin) / EPOCHS
    print(json.dumps({
        "examples_per_second": len(x) / seconds, "seconds_an_epoch": seconds,
        "peak_memory_mb": peak_memory_mb(), "device": device_name(),
    }))


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV after each workload."""
    given = flags.FLAGS
    if given.contender:
        measure(given.contender, given.workload, given.data)
        return
    rows = []
    for workload in given.workloads:
        for data in DATA:
            print(workload, data, flush=True)
            shared = {"workload": workload, "data": data}
            contenders = {name: {"contender": name, **shared} for name in CONTENDERS}
            results = rounds.run_rounds("epochs", contenders, given.rounds)
            new = rounds.compare(
                results, "parallel", "examples_per_second", **shared, num_devices=DEVICES)
            rounds.append_csv(Path(given.out), new)
            rows += [{**row, "workload": f"{workload}, {data}"} for row in new]
    print(rounds.table(rows))


if __name__ == "__main__":
    flags.DEFINE_list("workloads", ["cnn", "gru_small", "gru", "text"], "Names in workloads.py.")
    flags.DEFINE_integer("rounds", 3, "Runs of each contender, in turn.", lower_bound=1)
    flags.DEFINE_string("out", "benchmarks/results/epochs.csv", "CSV to append to.")
    flags.DEFINE_enum("contender", None, CONTENDERS, "Measure this one, in this process.")
    flags.DEFINE_string("workload", "cnn", "With --contender: a name in workloads.py.")
    flags.DEFINE_enum("data", "dataset", DATA, "With --contender: the kind of data.")
    app.run(main)
