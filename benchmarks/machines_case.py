"""Measurements of one worker of several, besides training; prints one JSON line.

`machines.py` starts a group of them; there is no need to call it by hand.
"""

import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np  # noqa: E402  (TensorFlow reads the variable above)
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402

import towers  # noqa: E402
from benchmarks.contender import (  # noqa: E402
    batches,
    peak_memory_mb,
    tower_step,
    wait_for_other_workers,
)
from benchmarks.workloads import WORKLOADS  # noqa: E402
from towers.app.datasets.batches import load_examples, shuffled_batches  # noqa: E402
from towers.app.datasets.image_folder import ImageFiles  # noqa: E402
from towers.step.exchange import towers_of  # noqa: E402
from towers.step.sharding import rows_of_towers  # noqa: E402

_CASE = flags.DEFINE_enum("case", "exchange", ["exchange", "memory", "input"], "What is measured.")
_MEGABYTES = flags.DEFINE_list("megabytes", ["4.8"], "The float32 values of each worker, 10**6 B.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "In each, the exchange and the ring take turns.")
_SECONDS = flags.DEFINE_float("seconds", 0.5, "Of one turn, about.")
_STEPS = flags.DEFINE_list("steps", ["200", "1000"], "After which the memory is noted.")
_FOLDER = flags.DEFINE_string("folder", None, "Each worker writes and reads images there.")
_BATCH, _NUM_BATCHES, _STORED, _SHAPE = 64, 6, (375, 500), (224, 224, 3)  # images
_NUM_TENSORS = 8  # of equal size: what a step exchanges is packed
_KEY = 1000  # of the ring's group and its operations: far from those of towers
_WARM_UP_CALLS = 3


def main(argv: list[str]) -> None:
    """Prints what `exchange` or `memory` returns."""
    del argv
    towers.logical_cpus(1)
    measured = {"exchange": exchange, "memory": memory, "input": read_images}[_CASE.value]()
    print(json.dumps(measured))
    sys.stdout.flush()
    wait_for_other_workers()
    os._exit(0)


def exchange() -> dict[str, Any]:
    """{"sizes": [{"megabytes", "calls", "sent_mb", "exchange": [ms], "ring": [ms]}]}, one a round.

    sent_mb: megabytes that one worker sends in one exchange, from the loopback device's count.
    """
    step = tower_step(WORKLOADS["tiny"](), "towers", 1)
    sizes = [measure_size(step, float(text)) for text in _MEGABYTES.value]
    return {"sizes": sizes, "peak_memory_mb": peak_memory_mb(), "device": "CPU"}


def measure_size(step: towers.TowerStep, megabytes: float) -> dict[str, Any]:
    """The figures of one size, measured with `exchange`."""
    num_workers = step.cluster.num_workers
    each = max(1, round(megabytes * 1e6 / 4 / _NUM_TENSORS))
    values = [tf.fill([each], step.cluster.index + 1.0) for _ in range(_NUM_TENSORS)]
    packed = tf.concat(values, axis=0)

    # The way that a step's gradients take, without the rest of the step.
    @tf.function(autograph=False)
    def exchanged(*values: tf.Tensor) -> list[tf.Tensor]:
        return tf.nest.flatten(step.strategy.reduce([list(values)], step.tower_devices))

    instance_key = _KEY + each

    @tf.function(autograph=False)
    def reduced(packed: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=packed, group_size=num_workers, group_key=_KEY, instance_key=instance_key,
            ordering_token=[], merge_op="Add", final_op="Id", communication_hint="ring",
        )

    total = num_workers * (num_workers + 1) / 2
    ways: dict[str, Callable[[], Any]] = {
        "exchange": lambda: exchanged(*values), "ring": lambda: reduced(packed)
    }
    for way in ways.values():
        for _ in range(_WARM_UP_CALLS):
            for tensor in tf.nest.flatten(way()):
                assert float(tensor[0]) == float(tensor[-1]) == total
    calls = agreed_calls(step, max(_timed(way, 1)[0] for way in ways.values()))
    found: dict[str, list[float]] = {name: [] for name in ways}
    sent = []
    for index in range(_ROUNDS.value):
        for name in [*ways][:: -1 if index % 2 else 1]:
            seconds, count = _timed(ways[name], calls)
            found[name].append(1e3 * seconds)
            if name == "exchange":
                sent.append(count / num_workers / 1e6)
    return {
        "megabytes": megabytes, "calls": calls, "sent_mb": round(min(sent), 3), **found,
    }


def agreed_calls(step: towers.TowerStep, seconds: float) -> int:
    """The number of calls that fills a turn, agreed by all workers."""

    @tf.function(autograph=False)
    def total(value: tf.Tensor) -> list[tf.Tensor]:
        return tf.nest.flatten(step.strategy.reduce([[value]], step.tower_devices))

    (estimates,) = total(tf.constant([seconds]))
    return max(1, round(_SECONDS.value * step.cluster.num_workers / float(estimates[0])))


def memory() -> dict[str, Any]:
    """{"200": MB, "1000": MB}: what this process has in memory after so many steps."""
    workload, noted = WORKLOADS["tiny"](), {}
    step = tower_step(workload, "towers", 1)
    marks = sorted(map(int, _STEPS.value))
    x, y = workload.data(1)
    for index, (x, y) in enumerate(batches(x, y, workload.batch_size, marks[-1]), start=1):
        step.train_batch(x, y)
        if index in marks:
            noted[str(index)] = resident_mb()
    return {**noted, "peak_memory_mb": peak_memory_mb(), "device": "CPU"}


def read_images() -> dict[str, Any]:
    """{"own": [ms], "all": [ms]}: what a global batch takes to read and decode, one a round."""
    workers, folder = towers.join_workers(), Path(_FOLDER.value or "")
    names = [f"{workers.index}-{number}.jpg" for number in range(_BATCH * _NUM_BATCHES)]
    generator = np.random.default_rng(0)
    for name in names:
        coarse = generator.integers(0, 256, (48, 64, 3)).astype("float32")
        pixels = tf.cast(tf.image.resize(coarse, _STORED), tf.uint8)
        (folder / name).write_bytes(tf.io.encode_jpeg(pixels).numpy())
    labels = np.zeros(len(names), np.int32)
    examples = load_examples(ImageFiles(folder, names, labels, _SHAPE))
    count = workers.num_workers
    own = functools.partial(rows_of_towers, count, towers_of(workers.index, count, count))
    found: dict[str, list[float]] = {"own": [], "all": []}
    for index in range(_ROUNDS.value):
        for way in [*found][:: -1 if index % 2 else 1]:
            workers.barrier()
            begin = time.perf_counter()
            rows = own if way == "own" else None
            for batch in shuffled_batches(examples, _BATCH, 0, index, rows=rows):
                del batch
            found[way].append(1e3 * (time.perf_counter() - begin) / _NUM_BATCHES)
    return {**found, "calls": _NUM_BATCHES, "peak_memory_mb": peak_memory_mb(), "device": "CPU"}


def resident_mb() -> float:
    """This process's resident memory, MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _timed(way: Callable[[], Any], calls: int) -> tuple[float, int]:
    """(seconds of one call: the median, bytes of one call over loopback by everybody)."""
    seconds, before = [], _loopback_bytes()
    for _ in range(calls):
        begin = time.perf_counter()
        way()  # returns when the values are there, on a CPU
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), (_loopback_bytes() - before) // calls


def _loopback_bytes() -> int:
    """The bytes that this machine has sent to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


if __name__ == "__main__":
    app.run(main)
