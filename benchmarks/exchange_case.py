"""Times the sum over workers in one of them; exchange.py calls it in connected processes."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import towers
from benchmarks.contender import make_step
from benchmarks.machine import peak_memory_mb
from benchmarks.workloads import WORKLOADS
from towers.machine.devices import CPU

NUM_TENSORS = 8  # of equal size; small tensors are packed into one, as in a step
TURN_SECONDS = 0.5
WARM_UP_CALLS = 3
GROUP_KEY = 1000  # of the ring's collectives; towers uses smaller keys


def measure_exchange(megabytes: Sequence[float], rounds: int) -> dict[str, Any]:
    """Times the exchange and the ring, in turn.

    Returns:
        {"sizes": [{"megabytes", "calls", "sent_mb", "exchange": [ms], "ring": [ms]}]} with one
        value per round. "sent_mb" is what one worker sends in one exchange, by the counter of the
        loopback device.
    """
    towers.logical_cpus(1)
    step = make_step(WORKLOADS["tiny"](), "towers", 1)
    sizes = [_measure_size(step, size, rounds) for size in megabytes]
    return {"sizes": sizes, "peak_memory_mb": peak_memory_mb(), "device": "CPU"}


def _sum(step: towers.TowerStep, values: list[Any]) -> Any:
    return step.machine.exchange.reduce([values], step.tower_devices, CPU)


def _measure_size(step: towers.TowerStep, megabytes: float, rounds: int) -> dict[str, Any]:
    num_workers = step.cluster.num_workers
    length = max(1, round(megabytes * 1e6 / 4 / NUM_TENSORS))
    values = [tf.fill([length], step.cluster.index + 1.0) for _ in range(NUM_TENSORS)]
    packed = tf.concat(values, axis=0)

    @tf.function(autograph=False)
    def exchange(*values: tf.Tensor) -> list[tf.Tensor]:
        return tf.nest.flatten(_sum(step, list(values)))

    @tf.function(autograph=False)
    def ring(packed: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=packed,
            group_size=num_workers,
            group_key=GROUP_KEY,
            instance_key=GROUP_KEY + length,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="ring",
        )

    ways: dict[str, Callable[[], Any]] = {
        "exchange": lambda: exchange(*values),
        "ring": lambda: ring(packed),
    }
    total = num_workers * (num_workers + 1) / 2
    for way in ways.values():
        for _ in range(WARM_UP_CALLS):
            for tensor in tf.nest.flatten(way()):
                assert float(tensor[0]) == float(tensor[-1]) == total
    calls = _agree_on_calls(step, max(_time_calls(way, 1)[0] for way in ways.values()))
    found: dict[str, list[float]] = {name: [] for name in ways}
    sent = []
    for index in range(rounds):
        for name in [*ways][:: -1 if index % 2 else 1]:
            seconds, num_bytes = _time_calls(ways[name], calls)
            found[name].append(1e3 * seconds)
            if name == "exchange":
                sent.append(num_bytes / num_workers / 1e6)
    return {"megabytes": megabytes, "calls": calls, "sent_mb": round(min(sent), 3), **found}


def _agree_on_calls(step: towers.TowerStep, seconds: float) -> int:
    """Returns the number of calls that fill a turn, from the mean of all workers' estimates."""

    @tf.function(autograph=False)
    def add_up(value: tf.Tensor) -> list[tf.Tensor]:
        return tf.nest.flatten(_sum(step, [value]))

    (total,) = add_up(tf.constant([seconds]))
    return max(1, round(TURN_SECONDS * step.cluster.num_workers / float(total[0])))


def _time_calls(way: Callable[[], Any], calls: int) -> tuple[float, int]:
    """Returns (median seconds of a call, bytes that all workers send over loopback per call)."""
    seconds, before = [], _loopback_bytes()
    for _ in range(calls):
        start = time.perf_counter()
        way()  # on a CPU, it returns when the values are there
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), (_loopback_bytes() - before) // calls


def _loopback_bytes() -> int:
    """Returns the number of bytes that this machine has sent to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0
