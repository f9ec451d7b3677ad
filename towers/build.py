"""TrainConfig -> Run: devices, input, model and update step, made real on this machine."""

import dataclasses
from typing import NamedTuple

import keras
import tensorflow as tf

from towers import datasets, models
from towers.config import TrainConfig
from towers.datasets.batches import Examples, load_examples, num_steps
from towers.datasets.options import InputOptions
from towers.machine import devices as devices_lib
from towers.machine.devices import has_started
from towers.machine.logical import divide_gpus, logical_cpus
from towers.machine.workers import Workers, join_workers
from towers.models.dropout import set_dropout
from towers.step import TowerStep

LOSS = "sparse_categorical_crossentropy"
METRICS = ("accuracy",)


class Run(NamedTuple):
    """A configuration, made real on this machine.

    config: with the number of towers, the global batch and the threads filled in: they define
        the run, whatever devices compute it.
    batch_size: the global batch.
    steps_an_epoch: the last one may be a partial batch.
    workers: those that train together.
    """

    config: TrainConfig
    step: TowerStep
    train: Examples
    test: Examples
    batch_size: int
    steps_an_epoch: int
    workers: Workers


def build(config: TrainConfig) -> Run:
    """Input, model and update step of a configuration; traces nothing yet.

    Raises:
        ValueError: see `train`.
    """
    devices = find_devices(config)
    home = _variable_device(config.variable_device)
    source = models.load(config.model)
    dataset = datasets.load(
        config.dataset,
        config.data_dir,
        input_shape=source.input_shape,
        num_classes=source.num_classes,
        features=config.features,
    )
    options = InputOptions(
        config.augment, config.data_workers, config.data_timeout, config.shuffle_buffer
    )
    train_examples, test_examples = (
        load_examples(split, datasets.num_examples(split), how)
        for split, how in (
            (dataset.train, options), (dataset.test, options._replace(augment=None))
        )
    )
    keras.utils.set_random_seed(config.seed)
    with tf.device(home):
        model = source.build(dataset.input_shape, dataset.num_classes)
        if config.dropout is not None:
            set_dropout(model, config.dropout)
        optimizer = make_optimizer(
            config.optimizer or source.optimizer, config.learning_rate, config.precision
        )
        step = TowerStep(
            model,
            optimizer,
            LOSS,
            metrics=METRICS,
            devices=devices,
            num_towers=config.num_towers,
            batch_norm=config.batch_norm,
            nonfinite=config.nonfinite,
            jit_compile=config.jit_compile,
            inline_towers=config.inline_towers,
            pack_transfers=config.pack_transfers,
        )
        # For callbacks that set the learning rate, and for whoever loads the saved model.
        model.compile(optimizer, LOSS, metrics=list(METRICS))
    batch_size = config.global_batch_size(len(devices) * step.cluster.num_workers)
    steps = num_steps(train_examples.num_examples, batch_size)
    resolved = dataclasses.replace(
        config,
        num_towers=step.num_towers,
        batch_size=batch_size,
        batch_size_per_gpu=None,
        cpu_threads=devices_lib.intra_op_threads() if step.policy.divide_cores else None,
    )
    workers = Workers(step.cluster)
    return Run(resolved, step, train_examples, test_examples, batch_size, steps, workers)


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
