"""Trains a workload with one contender, in its own process, and prints one JSON line.

`throughput.py` and `first_step.py` start it; there is no need to call it by hand.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras  # noqa: E402  (TensorFlow reads the variable above)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from absl import app, flags  # noqa: E402

import towers  # noqa: E402
from towers.step.step import Computed  # noqa: E402
from benchmarks.clocks import Clock  # noqa: E402
from benchmarks.machine import count_cores, is_rehearsal  # noqa: E402
from benchmarks.workloads import WORKLOADS, Workload  # noqa: E402

# TowerStep, one tower a device, the parameters on /cpu:0; and one option changed at a time.
TOWERS: dict[str, dict[str, Any]] = {
    "towers": {},
    "compiled": {"jit_compile": True},
    "checked": {"nonfinite": "stop"},
    "unplaced": {},  # shards go to GPUs in the step, not ahead of it
    "on_gpu": {},  # the parameters on /gpu:0
    "copies": {"strategy": "mirrored"},  # and a copy of them on each other GPU
    "stages_2": {"gpus_per_tower": 2},  # these: as many towers as devices, whatever the groups
    "stages_4": {"gpus_per_tower": 4},
    "limit": {},  # LimitStep
}
FITS = ("fit", "fit_no_jit")  # Keras' fit on one device: as it is; never compiled by XLA
STRATEGIES = ("mirrored", "mirrored_one", "central")  # Keras' fit under tf.distribute
CONTENDERS = (*TOWERS, "parallel", *FITS, *STRATEGIES)
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


class Trainer(NamedTuple):
    """A contender, ready to train.

    train: (dataset of (x, y), Keras callback) -> None; one pass, or until the callback sets its
        model's `stop_training`.
    how: the settings that the contender chose, for the record.
    """

    train: Callable[[tf.data.Dataset, keras.callbacks.Callback], None]
    how: str = ""


class LimitStep(towers.TowerStep):
    """Towers without averaging and without update, which no step can exceed."""

    def _add_up(self, outputs: Any, shards: Any) -> Computed:
        with tf.device(self.parameter_device):
            predictions = None if shards is None else self._predictions(outputs, shards)
        return Computed(outputs, [], {}, predictions, None)

    def update(self, computed: Any) -> tf.Tensor:
        touched, outputs = [], computed.tree
        for output, device in zip(outputs, self.tower_devices, strict=True):
            with tf.device(device):  # else the graph drops the gradients, too
                touched.append(tf.add_n([tf.reshape(g, [-1])[0] for g in output.gradients]))
        return tf.add_n([*touched, *[output.loss for output in outputs]])


def tower_step(workload: Workload, contender: str, num_devices: int) -> towers.TowerStep:
    """A tower for each device; the parameters on the CPU, or on the first GPU."""
    keras.utils.set_random_seed(0)  # the same parameters in every worker
    step_class = LimitStep if contender == "limit" else towers.TowerStep
    home = "/cpu:0"
    if contender in ("on_gpu", "copies"):
        (home,) = towers.tower_devices(1, "auto" if is_rehearsal() else "gpu")
    with tf.device(home):
        return step_class(
            workload.build(), workload.optimizer(), workload.loss, metrics=METRICS,
            devices=towers.tower_devices(num_devices), **_with_towers(contender, num_devices),
        )


def _with_towers(contender: str, num_devices: int) -> dict[str, Any]:
    options = TOWERS.get(contender, {})
    return {**options, "num_towers": num_devices} if "gpus_per_tower" in options else options


def tower_trainer(workload: Workload, contender: str, num_devices: int) -> Trainer:
    """Towers, one a device, which call the callback around each step as Keras' fit does."""
    step = tower_step(workload, contender, num_devices)

    def train(dataset: tf.data.Dataset, callback: keras.callbacks.Callback) -> None:
        callback.set_model(step.model)
        step.model.stop_training = False
        to_devices = False if contender == "unplaced" else None
        ahead = towers.prefetched(step, dataset, to_devices=to_devices)
        for index, (x, y, placed) in enumerate(ahead):
            callback.on_train_batch_begin(index)
            logs = step.train_batch(x, y, placed=placed)
            callback.on_train_batch_end(index, logs)
            if step.model.stop_training:
                break

    return Trainer(train)


def fit_trainer(
    workload: Workload,
    scope: Any,
    wrap: Callable = lambda model: model,
    jit_compile: bool | str = "auto",
) -> Trainer:
    """Keras' own fit.

    Args:
        workload: the workload to train.
        scope: the context in which the model is made and compiled.
        wrap: a function that is applied to the model before it is compiled.
        jit_compile: "auto", Keras' default, compiles with XLA on one GPU what XLA can compile.
    """
    with scope:
        model = wrap(workload.build())
        model.compile(
            workload.optimizer(), workload.loss, metrics=METRICS, jit_compile=jit_compile
        )

    def train(dataset: tf.data.Dataset, callback: keras.callbacks.Callback) -> None:
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[callback])

    return Trainer(train, "XLA" if model.jit_compile else "no XLA")


def mirrored_trainer(workload: Workload, contender: str, num_devices: int) -> Trainer:
    """Keras' fit under MirroredStrategy.

    NCCL refuses two logical GPUs of one card. There TensorFlow's own choice is to sum everything
    on one device, which is "mirrored_one". "mirrored" takes the only all-reduce that is left: it
    spreads the sums over the devices.
    """
    names = towers.tower_devices(num_devices)
    reduction = None  # TensorFlow's choice: NCCL between physical GPUs
    if contender == "mirrored_one":
        reduction = tf.distribute.ReductionToOneDevice()
    elif has_logical_gpus() or is_rehearsal():
        reduction = tf.distribute.HierarchicalCopyAllReduce()
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=reduction)
    how = "TensorFlow's choice" if reduction is None else type(reduction).__name__
    return fit_trainer(workload, strategy.scope())._replace(how=how)


def trainer(contender: str, workload: Workload, num_devices: int) -> Trainer:
    """A contender, ready to train a workload."""
    if contender in TOWERS:
        return tower_trainer(workload, contender, num_devices)
    if contender in FITS:
        jit_compile = "auto" if contender == "fit" else False
        return fit_trainer(workload, nullcontext(), jit_compile=jit_compile)
    if contender == "parallel":
        return fit_trainer(
            workload, tf.device("/cpu:0"), lambda model: towers.make_parallel(model, num_devices)
        )
    if contender != "central":
        return mirrored_trainer(workload, contender, num_devices)
    names = towers.tower_devices(num_devices)
    strategy = tf.distribute.experimental.CentralStorageStrategy(names, "/cpu:0")
    return fit_trainer(workload, strategy.scope())


def set_up(contender: str, num_devices: int) -> None:
    """Makes the devices, as a contender does, before TensorFlow starts."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus:
        if num_devices > gpus:
            towers.logical_gpus(num_devices)
    elif contender not in FITS:
        towers.logical_cpus(num_devices, set_threads=contender not in STRATEGIES)


def has_logical_gpus() -> bool:
    """Whether GPUs are divided."""
    logical, physical = tf.config.list_logical_devices, tf.config.list_physical_devices
    return len(logical("GPU")) > len(physical("GPU"))


def batches(x: np.ndarray, y: np.ndarray, batch_size: int, passes: int) -> tf.data.Dataset:
    """One input for all contenders; autotuning would keep a thread busy beside it."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).cache()
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.repeat(passes).prefetch(2).with_options(options)


def default_devices(workload: Workload) -> int:
    """All GPUs; without any, the logical CPU devices that train the workload fastest."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    return gpus or workload.towers_per_core * count_cores()


def device_name() -> str:
    """The GPU's name; "CPU" without one."""
    for gpu in tf.config.list_physical_devices("GPU"):
        return tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    return "CPU"


def peak_memory_mb() -> float:
    """The most that this process has had in the CPU's memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def wait_for_other_workers() -> None:
    """Stays until the others have what this process sent last; without it, they would lose it."""
    if towers.join_workers().num_workers > 1:
        time.sleep(1)


def main(argv: list[str]) -> None:
    """Prints {"first_step_seconds", "examples_per_second", "peak_memory_mb", ...}."""
    del argv
    towers.join_workers()
    contender, workload = flags.FLAGS.contender, WORKLOADS[flags.FLAGS.workload]()
    num_devices = flags.FLAGS.num_devices or default_devices(workload)
    set_up(contender, num_devices)
    steps = workload.steps if flags.FLAGS.steps is None else flags.FLAGS.steps
    num_batches = max(1, min(steps, LARGEST_PASS))
    x, y = workload.data(num_batches)
    dataset = batches(x, y, workload.batch_size, max(1, -(-steps // num_batches)))
    start = time.perf_counter()
    train = trainer(contender, workload, num_devices).train
    built = time.perf_counter()
    train(dataset.take(1), Clock())
    first = time.perf_counter()
    result = {"build_seconds": built - start, "first_step_seconds": first - built}
    if steps:
        train(dataset, Clock())
        clock = Clock()  # times between steps of one pass: its end waits for tf.data's threads
        began = time.process_time()
        train(dataset, clock)
        times = clock.times
        result["cpu_seconds_per_step"] = (time.process_time() - began) / len(times)
        examples = (len(times) - 1) * workload.batch_size
        result["examples_per_second"] = examples / (times[-1] - times[0])
        result["timed_seconds"] = times[-1] - times[0]
        steps = len(times)
    about = {"num_devices": num_devices, "steps": steps, "peak_memory_mb": peak_memory_mb()}
    about["device"] = device_name()
    print(json.dumps(result | about))
    sys.stdout.flush()
    wait_for_other_workers()
    os._exit(0)


if __name__ == "__main__":
    define_flags()
    app.run(main)
