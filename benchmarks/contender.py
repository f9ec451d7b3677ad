"""One contender in a process of its own: trains a workload and prints one JSON line.

`throughput.py` and `first_step.py` start it; there is no need to call it by hand.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras  # noqa: E402  (TensorFlow reads the variable above)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402

from benchmarks.workloads import WORKLOADS, Workload  # noqa: E402
from towers import devices as devices_lib  # noqa: E402
from towers.parallel_model import make_parallel  # noqa: E402
from towers.prefetch import prefetched  # noqa: E402
from towers.step import TowerStep  # noqa: E402

# TowerStep, one tower a device, the parameters on /cpu:0; and one option changed at a time.
TOWERS: dict[str, dict[str, Any]] = {
    "towers": {},
    "inlined": {"inline_towers": True},
    "packed": {"pack_transfers": True},
    "compiled": {"jit_compile": True},
    "checked": {"nonfinite": "stop"},
    "unplaced": {},  # shards go to GPUs in the step, not ahead of it
    "on_gpu": {},  # the parameters on /gpu:0
    "limit": {},  # LimitStep
}
CONTENDERS = (*TOWERS, "parallel", "fit", "mirrored", "central")  # these four by Keras' fit
METRICS = ["accuracy"]
LARGEST_PASS = 30  # distinct batches; more steps repeat them


def define_flags() -> None:
    """The flags of this process."""
    flags.DEFINE_enum("contender", "towers", CONTENDERS, "Who trains.")
    flags.DEFINE_enum("workload", "cnn", sorted(WORKLOADS), "What is trained.")
    flags.DEFINE_integer("num_devices", None, "GPUs, or logical CPU devices without any. Default: "
                         "all GPUs, or as many as suit the workload.")
    flags.DEFINE_integer("steps", None, "Steps that are timed, after as many that are not. 0: "
                         "none. Default: the workload's.")


class LimitStep(TowerStep):
    """The same towers without averaging and without update: what no step can exceed."""

    def _update(self, outputs: list, tree: Any) -> list:
        del tree  # nothing needs the sums any more: the graph drops them unmade
        touched = []
        for output, device in zip(outputs, self.tower_devices, strict=True):
            with tf.device(device):  # else the graph drops the gradients, too
                touched.append(tf.add_n([tf.reshape(g, [-1])[0] for g in output.gradients]))
        loss = tf.add_n([*touched, *[output.loss for output in outputs]])
        return [loss, *[outputs[0].state[i] for i in self._averaged]]


def tower_trainer(workload: Workload, contender: str, num_devices: int) -> Callable:
    """Returns train(dataset) -> [time at the end of each step], on towers, one a device."""
    step_class = LimitStep if contender == "limit" else TowerStep
    home = "/gpu:0" if contender == "on_gpu" else "/cpu:0"
    devices_lib.check_devices([home])
    with tf.device(home):
        step = step_class(
            workload.build(), workload.optimizer(), workload.loss, metrics=METRICS,
            devices=devices_lib.tower_devices(num_devices), **TOWERS[contender],
        )

    def train(dataset: tf.data.Dataset) -> list[float]:
        times = []
        to_devices = False if contender == "unplaced" else None
        for x, y, placed in prefetched(step, dataset, to_devices=to_devices):
            step.train_batch(x, y, placed=placed)["loss"].numpy()
            times.append(time.perf_counter())
        return times

    return train


class Clock(keras.callbacks.Callback):
    """Notes when each step of `fit` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self.times.append(time.perf_counter())


def fit_trainer(workload: Workload, scope: Any, wrap: Callable = lambda model: model) -> Callable:
    """Returns train(dataset) -> [time at the end of each step], by Keras' own fit.

    Args:
        workload: what is trained.
        scope: the context in which the model is made and compiled.
        wrap: what is done to the model before it is compiled.
    """
    with scope:
        model = wrap(workload.build())
        model.compile(workload.optimizer(), workload.loss, metrics=METRICS)

    def train(dataset: tf.data.Dataset) -> list[float]:
        clock = Clock()
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[clock])
        return clock.times

    return train


def set_up(contender: str, num_devices: int) -> None:
    """Sets TensorFlow up as a contender does, before it starts."""
    if devices_lib.has_gpus() or contender == "fit":
        return
    if contender not in ("mirrored", "central"):
        devices_lib.set_cpu_threads(num_devices)
    devices_lib.logical_cpus(num_devices)


def trainer(contender: str, workload: Workload, num_devices: int) -> Callable:
    """Returns train(dataset) -> [time at the end of each step] for a contender.

    Times are taken between steps of one pass: the end of a pass waits for tf.data's threads.
    """
    if contender in TOWERS:
        return tower_trainer(workload, contender, num_devices)
    if contender == "parallel":
        return fit_trainer(workload, tf.device("/cpu:0"), lambda m: make_parallel(m, num_devices))
    if contender == "fit":
        return fit_trainer(workload, nullcontext())
    names = devices_lib.tower_devices(num_devices)
    if contender == "mirrored":
        return fit_trainer(workload, tf.distribute.MirroredStrategy(names).scope())
    strategy = tf.distribute.experimental.CentralStorageStrategy(names, "/cpu:0")
    return fit_trainer(workload, strategy.scope())


def batches(x: np.ndarray, y: np.ndarray, batch_size: int, passes: int) -> tf.data.Dataset:
    """The same input for every contender; autotuning would keep a thread busy beside it."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).cache()
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.repeat(passes).prefetch(2).with_options(options)


def default_devices(workload: Workload) -> int:
    """All GPUs; without any, the logical CPU devices that train the workload fastest."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    return gpus or workload.towers_per_core * devices_lib.count_cores()


def device_name() -> str:
    """The GPU's name; "CPU" without one."""
    for gpu in tf.config.list_physical_devices("GPU"):
        return tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    return "CPU"


def main(argv: list[str]) -> None:
    """Prints {"first_step_seconds", "examples_per_second", "peak_memory_mb", ...}."""
    del argv
    contender, workload = flags.FLAGS.contender, WORKLOADS[flags.FLAGS.workload]()
    num_devices = flags.FLAGS.num_devices or default_devices(workload)
    set_up(contender, num_devices)
    steps = workload.steps if flags.FLAGS.steps is None else flags.FLAGS.steps
    num_batches = max(1, min(steps, LARGEST_PASS))
    x, y = workload.data(num_batches)
    dataset = batches(x, y, workload.batch_size, max(1, -(-steps // num_batches)))
    start = time.perf_counter()
    train = trainer(contender, workload, num_devices)
    built = time.perf_counter()
    train(dataset.take(1))
    first = time.perf_counter()
    result = {"build_seconds": built - start, "first_step_seconds": first - built}
    if steps:
        train(dataset)
        times = train(dataset)
        examples = (len(times) - 1) * workload.batch_size
        result["examples_per_second"] = examples / (times[-1] - times[0])
        result["timed_seconds"] = times[-1] - times[0]
        steps = len(times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    about = {"num_devices": num_devices, "steps": steps, "peak_memory_mb": peak}
    about["device"] = device_name()
    print(json.dumps(result | about))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    define_flags()
    app.run(main)
