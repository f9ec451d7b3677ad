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
from towers.step import TowerStep  # noqa: E402

CONTENDERS = ("towers", "limit", "parallel", "fit", "mirrored", "central")
LOSS, METRICS = "sparse_categorical_crossentropy", ["accuracy"]

_CONTENDER = flags.DEFINE_enum("contender", "towers", CONTENDERS, "Who trains.")
_WORKLOAD = flags.DEFINE_enum("workload", "cnn", sorted(WORKLOADS), "What is trained.")
_DEVICES = flags.DEFINE_integer("num_devices", 2, "GPUs, or logical CPU devices without any.")
_STEPS = flags.DEFINE_integer("steps", 60, "Steps that are timed, after a warm-up; 0: none.")


class LimitStep(TowerStep):
    """The same towers without averaging and without update: what no step can exceed."""

    def _update(self, outputs: list, shards: list) -> list:
        gradients = [g for output in outputs for g in output.gradients]
        touched = [tf.reshape(g, [-1])[0] for g in gradients]  # else the graph drops them unmade
        loss = tf.add_n([*touched, *[output.loss for output in outputs]])
        return [loss, *[outputs[0].state[i] for i in self._averaged]]


def tower_trainer(workload: Workload, step_class: type, num_devices: int) -> Callable:
    """Returns train(dataset) -> [time at the end of each step], on towers, one a device."""
    names = devices_lib.tower_devices(num_devices)
    with tf.device("/cpu:0"):
        model = workload.build()
    step = step_class(model, workload.optimizer(), LOSS, metrics=METRICS, devices=names)

    def train(dataset: tf.data.Dataset) -> list[float]:
        times = []
        for x, y in dataset:
            step.train_batch(x, y)["loss"].numpy()
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
        model.compile(workload.optimizer(), LOSS, metrics=METRICS)

    def train(dataset: tf.data.Dataset) -> list[float]:
        clock = Clock()
        model.fit(dataset, verbose=0, callbacks=[clock])
        return clock.times

    return train


def set_up(contender: str, num_devices: int) -> None:
    """Sets TensorFlow up as a contender does, before it starts."""
    if devices_lib.has_gpus() or contender == "fit":
        return
    if contender in ("towers", "limit", "parallel"):
        devices_lib.set_cpu_threads(num_devices)
    devices_lib.logical_cpus(num_devices)


def trainer(contender: str, workload: Workload, num_devices: int) -> Callable:
    """Returns train(dataset) -> [time at the end of each step] for a contender.

    Times are taken between steps of one pass: the end of a pass waits for tf.data's threads.
    """
    if contender in ("towers", "limit"):
        return tower_trainer(workload, {"towers": TowerStep, "limit": LimitStep}[contender],
                             num_devices)
    if contender == "parallel":
        return fit_trainer(workload, tf.device("/cpu:0"), lambda m: make_parallel(m, num_devices))
    if contender == "fit":
        return fit_trainer(workload, nullcontext())
    names = devices_lib.tower_devices(num_devices)
    if contender == "mirrored":
        return fit_trainer(workload, tf.distribute.MirroredStrategy(names).scope())
    strategy = tf.distribute.experimental.CentralStorageStrategy(names, "/cpu:0")
    return fit_trainer(workload, strategy.scope())


def batches(x: np.ndarray, y: np.ndarray, batch_size: int) -> tf.data.Dataset:
    """The same input for every contender; autotuning would keep a thread busy beside it."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).cache().prefetch(2)
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def main(argv: list[str]) -> None:
    """Prints {"first_step_seconds", "examples_per_second", "peak_memory_mb", ...}."""
    del argv
    set_up(_CONTENDER.value, _DEVICES.value)
    workload = WORKLOADS[_WORKLOAD.value]()
    num_batches = max(1, min(_STEPS.value, 60))
    x, y = workload.data(num_batches)
    dataset = batches(x, y, workload.batch_size)
    start = time.perf_counter()
    train = trainer(_CONTENDER.value, workload, _DEVICES.value)
    built = time.perf_counter()
    train(dataset.take(1))
    first = time.perf_counter()
    result = {"build_seconds": built - start, "first_step_seconds": first - built}
    if _STEPS.value:
        train(dataset)
        times = train(dataset)
        examples = (len(times) - 1) * workload.batch_size
        result["examples_per_second"] = examples / (times[-1] - times[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result | {"peak_memory_mb": peak}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    app.run(main)
