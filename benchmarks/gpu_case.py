"""Measures one case of gpu.py in its own process, and prints a JSON line.

`gpu.py` starts it; there is no need to call it by hand.
"""

import json
import os
import sys
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # errors alone, which say why a GPU refuses something

import tensorflow as tf  # noqa: E402  (reads the variable above)
from absl import app, flags  # noqa: E402

from benchmarks import contender, gpu_workloads  # noqa: E402
from benchmarks.clocks import Clock, Stopwatch, synchronized_time  # noqa: E402
from benchmarks.gpu_plan import CONTENDERS, PRECISIONS, TRIP  # noqa: E402
from benchmarks.trip import measure_trip  # noqa: E402
from benchmarks.workloads import Workload  # noqa: E402

_ENDLESS = 10**6  # passes; the stopwatch ends them


def define_flags() -> None:
    """Defines the flags of this process: the fields of a `gpu_plan.Case`, and how it runs."""
    flags.DEFINE_enum("workload", "cnn", gpu_workloads.NAMES, "What is trained.")
    flags.DEFINE_enum("precision", "float32", PRECISIONS, "Keras' dtype policy.")
    flags.DEFINE_integer("batch_size", 128, "Global batch.", lower_bound=1)
    flags.DEFINE_integer("num_devices", 1, "GPUs; logical ones if there are fewer.", lower_bound=1)
    flags.DEFINE_enum("contender", "towers", CONTENDERS, "Who trains.")
    flags.DEFINE_float("timed_seconds", 4.0, "To time steps for.", lower_bound=0.0)
    flags.DEFINE_boolean("small", False, "Tiny models.")


def measure_steps(workload: Workload, name: str, num_devices: int, seconds: float) -> dict:
    """Measures the first step, and the mean of the steps that fit into some seconds.

    Args:
        workload: the workload to train.
        name: the contender.
        num_devices: for it.
        seconds: to time, after a warm-up of a quarter of that, at least one pass over the data.
    """
    num_batches = gpu_workloads.batches_a_pass(workload)
    x, y = workload.data(num_batches)
    dataset = contender.batches(x, y, workload.batch_size, _ENDLESS)
    begin = _progress("the data is made")
    train, how = contender.trainer(name, workload, num_devices)
    built = _progress("the model is built")
    train(dataset.take(1), Clock())
    first = _progress("the first step is done")
    stopwatch = Stopwatch(num_batches, seconds / 4, seconds)
    train(dataset, stopwatch)
    each = stopwatch.seconds / stopwatch.num_steps
    return {
        "ms_per_step": 1e3 * each, "examples_per_second": workload.batch_size / each,
        "build_seconds": built - begin, "first_step_seconds": first - built,
        "steps": stopwatch.num_steps, "timed_seconds": stopwatch.seconds, "how": how,
    }


def gpu_memory_mb() -> float | None:
    """The most that the first GPU has held; None without one."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20


def measure(given: Any) -> dict[str, Any]:
    """Measures the case that the flags ask for."""
    workload = gpu_workloads.load(
        given.workload, given.batch_size, given.precision, given.small
    )
    contender.set_up(given.contender, given.num_devices)
    if given.contender == TRIP:
        step = contender.tower_step(workload, "towers", given.num_devices)
        result = measure_trip(step, given.timed_seconds / 2)
    else:
        result = measure_steps(workload, given.contender, given.num_devices, given.timed_seconds)
    return result | {
        "peak_memory_mb": contender.peak_memory_mb(), "gpu_memory_mb": gpu_memory_mb()
    }


def main(argv: list[str]) -> None:
    """Prints what was measured."""
    del argv
    print(json.dumps(measure(flags.FLAGS)))
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's own end takes time, and has nothing left to save


def _progress(done: str) -> float:
    """Prints how far the case came; returns the time, with every GPU idle."""
    now = synchronized_time()
    print(done, file=sys.stderr, flush=True)
    return now


if __name__ == "__main__":
    define_flags()
    app.run(main)
