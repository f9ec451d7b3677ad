"""Measures one case of gpu_plan.py. gpu.py calls `measure` in a fresh process."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

import towers
from benchmarks import contender as contenders
from benchmarks.clocks import Clock, Stopwatch, synchronized_time
from benchmarks.gpu_plan import TRANSFERS
from benchmarks.machine import peak_memory_mb
from benchmarks.workloads import WORKLOADS, Workload, built_in_workload, momentum

LARGE = {
    **WORKLOADS,
    "resnet50": lambda: built_in_workload("resnet50", momentum, 256, 0),
    "gru": lambda: built_in_workload("gru_large", keras.optimizers.Adam, 512, 0),
}
SMALL = {**WORKLOADS, "mlp41m": WORKLOADS["mlp"], "gru": WORKLOADS["gru_small"]}

MAX_BATCHES = 10  # distinct batches; more steps repeat them
MAX_BATCH_BYTES = 512 * 2**20  # of all distinct batches together, but at least 2 batches
WARM_UP_CALLS = 3
ENDLESS = 10**6  # repeats of the data; the stopwatch ends the training


def measure(
    workload: str,
    precision: str,
    batch_size: int,
    num_devices: int,
    contender: str,
    timed_seconds: float,
    small: bool,
) -> dict[str, Any]:
    """Measures a case of gpu_plan.py; returns columns of gpu.csv.

    Args:
        workload, precision, batch_size, num_devices, contender: the fields of the `Case`.
        timed_seconds: time for which steps or transfers are timed.
        small: whether to use small models.
    """
    chosen = load_workload(workload, batch_size, precision, small)
    contenders.set_up_devices(contender, num_devices)
    if contender == TRANSFERS:
        step = contenders.make_step(chosen, "towers", num_devices)
        result = measure_transfers(step, timed_seconds / 2)
    else:
        result = measure_steps(chosen, contender, num_devices, timed_seconds)
    gpu_memory = None
    if tf.config.list_logical_devices("GPU"):
        gpu_memory = tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    return {**result, "peak_memory_mb": peak_memory_mb(), "gpu_memory_mb": gpu_memory}


def load_workload(name: str, batch_size: int, precision: str, small: bool) -> Workload:
    """Returns a workload with this global batch and this Keras dtype policy.

    With `small`, it returns a smaller model of the same kind, to rehearse on a CPU.
    """
    workload = (SMALL if small else LARGE)[name]()

    def build() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(precision)
        try:
            return workload.build()
        finally:
            keras.config.set_dtype_policy(before)

    def optimizer() -> keras.optimizers.Optimizer:
        inner = workload.optimizer()
        # Keras' `compile` would add the loss scale; TowerStep does not.
        is_scaled = precision == "mixed_float16"
        return keras.optimizers.LossScaleOptimizer(inner) if is_scaled else inner

    return replace(workload, build=build, optimizer=optimizer, batch_size=batch_size)


def measure_steps(
    workload: Workload, contender: str, num_devices: int, seconds: float
) -> dict[str, Any]:
    """Times the first step, and the steps that fit into `seconds`.

    The warm-up takes at least a quarter of that time and all distinct batches.
    """
    x, _ = replace(workload, batch_size=1).data(1)
    fitting = MAX_BATCH_BYTES // (x.nbytes * workload.batch_size)
    num_batches = max(2, min(MAX_BATCHES, fitting))
    dataset = contenders.make_dataset(*workload.data(num_batches), workload.batch_size, ENDLESS)
    start = _report("the data is made")
    train, how = contenders.make_trainer(contender, workload, num_devices)
    built = _report("the model is built")
    train(dataset.take(1), Clock())
    first = _report("the first step is done")
    stopwatch = Stopwatch(num_batches, seconds / 4, seconds)
    train(dataset, stopwatch)
    per_step = stopwatch.seconds / stopwatch.num_steps
    return {
        "ms_per_step": 1e3 * per_step,
        "examples_per_second": workload.batch_size / per_step,
        "build_seconds": built - start,
        "first_step_seconds": first - built,
        "steps": stopwatch.num_steps,
        "timed_seconds": stopwatch.seconds,
        "how": how,
    }


def measure_transfers(step: towers.TowerStep, seconds: float) -> dict[str, Any]:
    """Times the copies of a step: parameters down to all devices, gradients up, `seconds` each.

    A step may hide a part of these copies behind computations. All devices count together, and
    10**6 bytes are a megabyte.
    """
    variables = [v.value for v in step.model.variables]
    gradients = []  # one per variable, because BatchNormalization's statistics are sent up too
    for device in step.devices:
        with tf.device(device):
            gradients.append([tf.ones(v.shape, v.dtype) for v in variables])

    @tf.function(autograph=False)
    def copy_down() -> list:
        with tf.device(step.parameter_device):
            values = [tf.convert_to_tensor(v) for v in variables]
        return [_copy(values, device) for device in step.devices]

    @tf.function(autograph=False)
    def copy_up(gradients: list) -> list:
        return [_copy(values, step.parameter_device) for values in gradients]

    others = [device for device in step.devices if device != step.parameter_device]
    num_bytes = len(others) * sum(v.dtype.size * v.shape.num_elements() for v in variables)
    result: dict[str, Any] = {}
    for way, function in (("down", copy_down), ("up", lambda: copy_up(gradients))):
        per_call = _seconds_per_call(function, seconds)
        result |= {
            f"{way}_mb": num_bytes / 1e6,
            f"{way}_ms": 1e3 * per_call,
            f"{way}_gb_per_second": num_bytes / per_call / 1e9,
        }
    return result


def _copy(values: list, device: str) -> list:
    with tf.device(device):
        return [tf.identity(value) for value in values]


def _seconds_per_call(function: Callable[[], Any], seconds: float) -> float:
    """Returns the mean seconds of a call, until its last copy has arrived."""
    for _ in range(WARM_UP_CALLS):
        function()
    start = now = synchronized_time()
    count = 0
    while now - start < seconds:
        function()
        now = synchronized_time()
        count += 1
    return (now - start) / count


def _report(progress: str) -> float:
    """Waits until all devices are idle, writes the progress to stderr and returns the time."""
    synchronized_time()
    print(progress, file=sys.stderr, flush=True)
    return time.perf_counter()
