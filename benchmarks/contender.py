"""Trains a workload with one contender: towers, Keras' `fit` or a tf.distribute strategy.

    python -m benchmarks.contender --workload=cnn --steps=20 --num_devices=8

prints the result as JSON. The other benchmarks call `measure` in fresh processes.
"""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import towers
from benchmarks.clocks import Clock, throughput
from benchmarks.machine import count_cores, is_rehearsal, peak_memory_mb
from benchmarks.workloads import WORKLOADS, Workload
from towers.divide.parts import Parts

# Options of TowerStep. By default, each device has one tower, and the parameters are on /cpu:0.
TOWERS: dict[str, dict[str, Any]] = {
    "towers": {},
    "compiled": {"jit_compile": True},
    "unplaced": {},  # shards are copied to GPUs during the step instead of ahead of it
    "on_gpu": {},  # parameters on /gpu:0
    "copies": {"strategy": "mirrored"},  # parameters on /gpu:0, copied to all other GPUs
    "stages_2": {"gpus_per_tower": 2},  # as many towers as devices, each on a group of devices
    "stages_4": {"gpus_per_tower": 4},
    "limit": {},  # LimitStep
}
FITS = ("fit", "fit_no_jit")  # Keras' `fit` on one device: with its defaults, and without XLA
STRATEGIES = ("mirrored", "mirrored_one", "central")  # Keras' `fit` with tf.distribute
CONTENDERS = (*TOWERS, "parallel", *FITS, *STRATEGIES)  # "parallel" is make_parallel(...).fit
METRICS = ["accuracy"]
MAX_BATCHES = 30  # distinct batches; a longer run repeats them


class Trainer(NamedTuple):
    """A contender that is ready to train.

    train: (dataset of (x, y), Keras callback) -> None. It trains on the dataset once, or until the
        callback sets `stop_training` of its model.
    how: the settings that the contender chose, for the record.
    """

    train: Callable[[tf.data.Dataset, keras.callbacks.Callback], None]
    how: str = ""


class LimitStep(towers.TowerStep):
    """Towers without additions and without the update: an upper bound of a step's speed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limit = tf.function(self._compute, autograph=False)

    def train_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, placed: Any = None
    ) -> dict[str, tf.Tensor]:
        """Computes the loss and the parts of the gradients."""
        return {"loss": self._limit((x, y, sample_weight), placed)}

    def _compute(self, batch: Any, placed: Any) -> tf.Tensor:
        _, (loss, gradients), _ = self.steps.divided["gradients"].with_parts(batch, placed)
        used = list(loss.values)
        dense = [each for each in gradients if isinstance(each, Parts)]  # no slices, nor None
        for t, device in enumerate(self.tower_devices):
            with tf.device(device):  # TensorFlow would prune gradients that nothing uses
                own = [each.values[t] for each in dense]
                used.append(tf.add_n([tf.reshape(value, [-1])[0] for value in own]))
        return tf.add_n(used)


def make_step(workload: Workload, contender: str, num_devices: int) -> towers.TowerStep:
    """Builds the model and the TowerStep of a contender, with one tower per device."""
    keras.utils.set_random_seed(0)  # the same parameters in every worker
    options = TOWERS.get(contender, {})
    if "gpus_per_tower" in options:
        options = {**options, "num_towers": num_devices}
    parameter_device = "/cpu:0"
    if contender in ("on_gpu", "copies"):
        (parameter_device,) = towers.tower_devices(1, "auto" if is_rehearsal() else "gpu")
    with tf.device(parameter_device):
        return (LimitStep if contender == "limit" else towers.TowerStep)(
            workload.build(),
            workload.optimizer(),
            workload.loss,
            metrics=METRICS,
            devices=towers.tower_devices(num_devices),
            **options,
        )


def make_step_trainer(workload: Workload, contender: str, num_devices: int) -> Trainer:
    """Trains with a TowerStep and calls the callback around each step, as Keras' `fit` does."""
    step = make_step(workload, contender, num_devices)

    def train(dataset: tf.data.Dataset, callback: keras.callbacks.Callback) -> None:
        callback.set_model(step.model)
        step.model.stop_training = False
        to_devices = False if contender == "unplaced" else None
        prefetched = towers.prefetched(step, dataset, to_devices=to_devices)
        for index, (x, y, placed) in enumerate(prefetched):
            callback.on_train_batch_begin(index)
            logs = step.train_batch(x, y, placed=placed)
            callback.on_train_batch_end(index, logs)
            if step.model.stop_training:
                break

    return Trainer(train)


def make_fit_trainer(
    workload: Workload,
    scope: Any,
    wrap: Callable = lambda model: model,
    jit_compile: bool | str = "auto",
) -> Trainer:
    """Trains with Keras' `compile` and `fit`.

    Args:
        workload: the workload to train.
        scope: the context in which the model is built and compiled.
        wrap: a function that is applied to the model before `compile`.
        jit_compile: argument of `compile`. Keras' default, "auto", uses XLA on one GPU if it can.
    """
    with scope:
        model = wrap(workload.build())
        model.compile(workload.optimizer(), workload.loss, metrics=METRICS, jit_compile=jit_compile)

    def train(dataset: tf.data.Dataset, callback: keras.callbacks.Callback) -> None:
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[callback])

    return Trainer(train, "XLA" if model.jit_compile else "no XLA")


def make_mirrored_trainer(workload: Workload, contender: str, num_devices: int) -> Trainer:
    """Trains with Keras' `fit` under MirroredStrategy.

    NCCL does not support several logical GPUs on one card. TensorFlow then adds on one device
    ("mirrored_one"). "mirrored" spreads the additions over the devices instead.
    """
    names = towers.tower_devices(num_devices)
    reduction = None  # TensorFlow's choice: NCCL between physical GPUs
    if contender == "mirrored_one":
        reduction = tf.distribute.ReductionToOneDevice()
    elif has_logical_gpus() or is_rehearsal():
        reduction = tf.distribute.HierarchicalCopyAllReduce()
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=reduction)
    how = "TensorFlow's choice" if reduction is None else type(reduction).__name__
    return make_fit_trainer(workload, strategy.scope())._replace(how=how)


def make_trainer(contender: str, workload: Workload, num_devices: int) -> Trainer:
    """Builds a contender that is ready to train a workload."""
    if contender in TOWERS:
        return make_step_trainer(workload, contender, num_devices)
    if contender in FITS:
        jit_compile = "auto" if contender == "fit" else False
        return make_fit_trainer(workload, nullcontext(), jit_compile=jit_compile)
    if contender == "parallel":
        return make_fit_trainer(
            workload, tf.device("/cpu:0"), lambda model: towers.make_parallel(model, num_devices)
        )
    if contender != "central":
        return make_mirrored_trainer(workload, contender, num_devices)
    names = towers.tower_devices(num_devices)
    strategy = tf.distribute.experimental.CentralStorageStrategy(names, "/cpu:0")
    return make_fit_trainer(workload, strategy.scope())


def set_up_devices(contender: str, num_devices: int) -> None:
    """Creates the logical devices that a contender needs, before TensorFlow starts."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    if gpus:
        if num_devices > gpus:
            towers.logical_gpus(num_devices)
    elif contender not in FITS:
        towers.logical_cpus(num_devices, set_threads=contender not in STRATEGIES)


def has_logical_gpus() -> bool:
    """Returns whether a GPU is divided into logical GPUs."""
    logical, physical = tf.config.list_logical_devices, tf.config.list_physical_devices
    return len(logical("GPU")) > len(physical("GPU"))


def make_dataset(x: np.ndarray, y: np.ndarray, batch_size: int, repeats: int) -> tf.data.Dataset:
    """Makes the input of all contenders. Autotuning is off, because its thread takes CPU time."""
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size).cache()
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.repeat(repeats).prefetch(2).with_options(options)


def default_num_devices(workload: Workload) -> int:
    """Returns the number of GPUs, or of the logical CPU devices that train the workload fastest."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    return gpus or workload.towers_per_core * count_cores()


def device_name() -> str:
    """Returns the name of the first GPU, or "CPU"."""
    for gpu in tf.config.list_physical_devices("GPU"):
        return tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
    return "CPU"


def measure(
    contender: str = "towers",
    workload: str = "cnn",
    num_devices: int | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Trains a workload; call it in a fresh process.

    Args:
        contender: a name in `CONTENDERS`.
        workload: a name in workloads.py.
        num_devices: number of GPUs or logical CPU devices; None for `default_num_devices`.
        steps: timed steps, after as many warm-up steps. None for the workload's number, 0 for no
            steps after the first one.

    Returns:
        {"build_seconds", "first_step_seconds", "examples_per_second", "cpu_seconds_per_step", ...}
    """
    towers.join_workers()
    chosen = WORKLOADS[workload]()
    num_devices = num_devices or default_num_devices(chosen)
    set_up_devices(contender, num_devices)
    steps = chosen.steps if steps is None else steps
    num_batches = max(1, min(steps, MAX_BATCHES))
    x, y = chosen.data(num_batches)
    dataset = make_dataset(x, y, chosen.batch_size, max(1, -(-steps // num_batches)))
    start = time.perf_counter()
    train = make_trainer(contender, chosen, num_devices).train
    built = time.perf_counter()
    train(dataset.take(1), Clock())
    first = time.perf_counter()
    result = {"build_seconds": built - start, "first_step_seconds": first - built}
    if steps:
        train(dataset, Clock())
        clock = Clock()  # times only steps, because the end of a dataset waits for tf.data threads
        cpu_start = time.process_time()
        train(dataset, clock)
        steps = len(clock.times)
        result["cpu_seconds_per_step"] = (time.process_time() - cpu_start) / steps
        result |= throughput(clock.times, chosen.batch_size)
    return {
        **result,
        "num_devices": num_devices,
        "steps": steps,
        "peak_memory_mb": peak_memory_mb(),
        "device": device_name(),
    }


def main(argv: list[str]) -> None:
    """Prints the result as JSON."""
    del argv
    given = flags.FLAGS
    print(json.dumps(measure(given.contender, given.workload, given.num_devices, given.steps)))


if __name__ == "__main__":
    flags.DEFINE_enum("contender", "towers", CONTENDERS, "The contender that trains.")
    flags.DEFINE_enum("workload", "cnn", sorted(WORKLOADS), "The workload to train.")
    flags.DEFINE_integer(
        "num_devices",
        None,
        "Number of GPUs, or of logical CPU devices without "
        "GPUs. Default: all GPUs, or the workload's own number.",
    )
    flags.DEFINE_integer(
        "steps",
        None,
        "Timed steps, after as many warm-up steps. 0: only the "
        "first step. Default: the workload's number.",
    )
    app.run(main)
