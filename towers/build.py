"""TrainConfig -> Run: devices, input, model and update step, made real on this machine."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.best import Monitor, find_monitor
from towers.compiled import (
    CompiledMetrics,
    check_steps,
    directions,
    losses,
    recompile,
    set_learning_rate,
)
from towers.config import TrainConfig
from towers.datasets.batches import Examples, load_examples, num_steps
from towers.datasets.dataset import num_examples
from towers.machine import devices as devices_lib
from towers.machine.devices import has_started
from towers.machine.logical import divide_gpus, logical_cpus
from towers.machine.workers import Workers, join_workers
from towers.models.dropout import set_dropout
from towers.objects import Objects
from towers.step import TowerStep
from towers.task import build_layers, build_metrics, find_source, make_model_and_data

LOSS = "sparse_categorical_crossentropy"
METRICS = ("accuracy",)
_DIRECTIONS = {"loss": "down", "accuracy": "up"}


class Run(NamedTuple):
    """A configuration, made real on this machine.

    config: with the number of towers, the global batch and the threads filled in: they define
        the run, whatever devices compute it.
    test: None where there is no validation.
    batch_size: the global batch.
    steps_an_epoch: the last one may be a partial batch.
    workers: those that train together.
    metrics: "loss" and the names of the metrics.
    monitor: what makes an epoch the best.
    own_task: the model was compiled, and brought its own loss, metrics and optimizer.
    first_iteration: what the optimizer had counted before: a saved model's goes on.
    """

    config: TrainConfig
    step: TowerStep
    train: Examples
    test: Examples | None
    batch_size: int
    steps_an_epoch: int
    workers: Workers
    metrics: Sequence[str] = ("loss", *METRICS)
    monitor: Monitor = Monitor()
    own_task: bool = False
    first_iteration: int = 0

    @property
    def columns(self) -> list[str]:
        """The names of an epoch's values in results.csv."""
        return _columns(self.metrics, self.test)


def build(config: TrainConfig, objects: Objects = Objects()) -> Run:
    """Input, model and update step of a configuration.

    Traces nothing yet, unless the model brings its own loss and metrics, whose names are needed.

    Args:
        config: the run.
        objects: what it does not name.

    Raises:
        ValueError: see `train`.
    """
    devices = find_devices(config)
    home = _variable_device(config.variable_device)
    source = find_source(config, objects)
    model, dataset = make_model_and_data(config, source, objects, home)
    train_examples = load_examples(dataset.train, num_examples(dataset.train))
    test_examples = None
    if dataset.test is not None:
        test_examples = load_examples(dataset.test, num_examples(dataset.test))
    own_task = model.compiled
    with tf.device(home):
        build_layers(model, train_examples)
        if config.dropout is not None:
            set_dropout(model, config.dropout)
        if own_task:
            check_steps(model)
            _give_optimizer(model, config)
        else:
            optimizer = make_optimizer(
                config.optimizer or source.optimizer, config.learning_rate, config.precision
            )
            model.compile(optimizer, LOSS, metrics=list(METRICS))
        loss, loss_weights = losses(model)
        metrics = CompiledMetrics(model)
        step = TowerStep(
            model,
            model.optimizer,
            loss,
            loss_weights=loss_weights,
            metrics=metrics,
            devices=devices,
            num_towers=config.num_towers,
            batch_norm=config.batch_norm,
            nonfinite=config.nonfinite,
            jit_compile=config.jit_compile,
            inline_towers=config.inline_towers,
            pack_transfers=config.pack_transfers,
        )
    better: Mapping[str, str | None] = _DIRECTIONS
    if own_task:
        build_metrics(step, train_examples)
        better = directions(model, metrics.names)
    monitor = find_monitor(
        config.monitor, config.monitor_mode, better, _columns(list(better), test_examples)
    )
    batch_size = config.global_batch_size(len(devices) * step.cluster.num_workers)
    resolved = dataclasses.replace(
        config,
        num_towers=step.num_towers,
        batch_size=batch_size,
        batch_size_per_gpu=None,
        cpu_threads=devices_lib.intra_op_threads() if step.policy.divide_cores else None,
        monitor=monitor.column,
    )
    return Run(
        resolved,
        step,
        train_examples,
        test_examples,
        batch_size,
        num_steps(train_examples.num_examples, batch_size),
        Workers(step.cluster),
        list(better),
        monitor,
        own_task,
        int(step.optimizer.iterations),
    )


def _columns(names: Sequence[str], test: Examples | None) -> list[str]:
    return [*names, *(f"val_{name}" for name in names if test is not None)]


def _give_optimizer(model: keras.Model, config: TrainConfig) -> None:
    """What is given beside a compiled model wins over what it was compiled with."""
    if config.optimizer is not None:
        recompile(model, make_optimizer(config.optimizer, config.learning_rate, config.precision))
    elif config.learning_rate is not None:
        set_learning_rate(model.optimizer, config.learning_rate)


def find_devices(config: TrainConfig) -> list[str]:
    """The devices of this worker that run towers, at most one for each of its towers.

    `logical_gpus` divides the GPUs. Without a GPU the CPU is split into logical devices, unless the
    caller has done so, or TensorFlow has started already.

    Raises:
        ValueError: there are fewer than asked for.
    """
    if config.logical_gpus is not None:
        divide_gpus(config.logical_gpus, None, "logical_gpus")
    if config.device == "cpu" or config.device == "auto" and not devices_lib.has_gpus():
        _split_cpu(config.num_gpus, config.num_towers, config.cpu_threads)
    devices = devices_lib.tower_devices(config.num_gpus, config.device)
    if config.num_towers is None:
        return devices
    return devices[: join_workers().most_towers(config.num_towers)]


def make_optimizer(
    name: str, learning_rate: float | None, precision: str
) -> keras.optimizers.Optimizer:
    """The Keras optimizer of that name; scales the loss where float16 would underflow.

    Args:
        name: such as "adam", in any case.
        learning_rate: None means the optimizer's own default.
        precision: a Keras dtype policy.

    Raises:
        ValueError: Keras has none of that name.
    """
    not_alone = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap")
    classes = {
        key.lower(): value
        for key, value in vars(keras.optimizers).items()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
        and key not in not_alone
    }
    if name.lower() not in classes:
        raise ValueError(f"optimizer ({name!r}) must be one of {', '.join(sorted(classes))}.")
    arguments = {} if learning_rate is None else {"learning_rate": learning_rate}
    optimizer = classes[name.lower()](**arguments)
    if precision == "mixed_float16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def _split_cpu(
    num_devices: int | None, num_towers: int | None, threads: int | None
) -> None:
    """One logical device for each tower, at most one a core unless more are asked for.

    Raises:
        ValueError: TensorFlow has started with other threads than asked for.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    if not has_started():  # else tower_devices knows whether its devices suffice
        if threads is not None:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
        if tf.config.get_logical_device_configuration(cpu) is None:
            cores = devices_lib.count_cores()
            towers = cores if num_towers is None else join_workers().most_towers(num_towers)
            logical_cpus(num_devices or min(cores, towers), num_towers=num_towers)
    if threads not in (None, devices_lib.intra_op_threads()):
        raise ValueError(
            f"cpu_threads ({threads}): TensorFlow has already started with "
            f"{devices_lib.intra_op_threads()}, which gives other bits. Begin a new process."
        )


def _variable_device(kind: str) -> str:
    if kind == "gpu" and not devices_lib.has_gpus():
        raise ValueError(
            "variable_device=gpu: TensorFlow sees no GPU on this machine. Use variable_device=cpu."
        )
    return f"/{kind}:0"
