"""TrainConfig -> Run: devices, input, model and update step, made real on this machine."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers import datasets, models
from towers.config import TrainConfig
from towers.datasets.batches import Examples, load_examples, num_steps
from towers.freezing import freeze
from towers.label_smoothing import smoothed
from towers.machine import devices as devices_lib
from towers.machine.devices import has_started
from towers.machine.logical import divide_gpus, logical_cpus
from towers.machine.policy import policy_of
from towers.machine.workers import Workers, join_workers
from towers.models.dropout import set_dropout
from towers.optimizer import learning_rate, make_optimizer, optimizer_class
from towers.schedules import Length, schedule_notes
from towers.starting_values import take_values
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
    make_step: of a number of towers, and whether those of one device take turns in any case,
        makes the same step of as many.
    notes: what to tell the user of the model and its training, in lines.
    """

    config: TrainConfig
    step: TowerStep
    train: Examples
    test: Examples
    batch_size: int
    steps_an_epoch: int
    workers: Workers
    make_step: Callable[[int, bool], TowerStep]
    notes: Sequence[str] = ()


def build(config: TrainConfig) -> Run:
    """Input, model and update step of a configuration; traces nothing yet.

    Raises:
        ValueError: see `train`.
    """
    _check_towers(config)
    devices = find_devices(config)
    home = _variable_device(config.variable_device)
    source = models.load(config.model)
    dataset = datasets.load(
        config.dataset,
        config.data_dir,
        input_shape=source.input_shape,
        num_classes=source.num_classes,
    )
    train_examples, test_examples = (
        load_examples(split, datasets.num_examples(split))
        for split in (dataset.train, dataset.test)
    )
    num_devices = len(devices) * join_workers().num_workers
    batch_size = config.global_batch_size(num_devices)
    steps = num_steps(train_examples.num_examples, batch_size)
    length = Length(_limited(config.epochs * steps, config.max_steps), steps)
    keras.utils.set_random_seed(config.seed)
    with tf.device(home):
        model = source.build(dataset.input_shape, dataset.num_classes)
        notes = _prepare(model, config)
        name = config.optimizer or source.optimizer
        optimizer = make_optimizer(config, name, length)
        if config.has_schedule:
            notes += schedule_notes(config, learning_rate(config, optimizer_class(name)), length)
        make_step = _step_maker(config, model, optimizer, devices)
        step = make_step(config.num_towers_on(num_devices), config.accumulate is not None)
        # For callbacks that set the learning rate, and for whoever loads the saved model, without
        # towers: with the loss of labels as they are.
        model.compile(optimizer, LOSS, metrics=list(METRICS))
    resolved = dataclasses.replace(
        config,
        num_towers=step.num_towers,
        batch_size=batch_size,
        batch_size_per_gpu=None,
        cpu_threads=devices_lib.intra_op_threads() if step.policy.divide_cores else None,
    )
    workers = Workers(step.cluster)
    return Run(
        resolved, step, train_examples, test_examples, batch_size, steps, workers, make_step,
        notes,
    )


def _prepare(model: keras.Model, config: TrainConfig) -> list[str]:
    """What is done to a model before it has an optimizer; in words, for the user."""
    if config.dropout is not None:
        set_dropout(model, config.dropout)
    notes = [take_values(model, config)] if config.init_from is not None else []
    if config.freeze is not None:
        notes.append(freeze(model, config.freeze))
    return [note for note in notes if note]


def _step_maker(
    config: TrainConfig,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    devices: Sequence[str],
) -> Callable[[int, bool], TowerStep]:
    """See `Run.make_step`."""

    def make_step(num_towers: int, take_turns: bool) -> TowerStep:
        policy = policy_of(devices)
        return TowerStep(
            model,
            optimizer,
            training_loss(config),
            metrics=METRICS,
            devices=devices,
            num_towers=num_towers,
            batch_norm=config.batch_norm,
            nonfinite=config.nonfinite,
            jit_compile=config.jit_compile,
            inline_towers=config.inline_towers,
            pack_transfers=config.pack_transfers,
            policy=dataclasses.replace(policy, take_turns=policy.take_turns or take_turns),
        )

    return make_step


def training_loss(config: TrainConfig) -> Any:
    """The loss of a run."""
    return smoothed(LOSS, config.label_smoothing)


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
        _split_cpu(config.num_gpus, config.fixed_towers, config.cpu_threads)
    devices = devices_lib.tower_devices(config.num_gpus, config.device)
    if config.fixed_towers is None:
        return devices
    return devices[: join_workers().most_towers(config.fixed_towers)]


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


def _check_towers(config: TrainConfig) -> None:
    """Of a run that goes on both numbers are known: each device may have other towers now."""
    both = config.accumulate is not None and config.num_towers is not None
    if both and config.resume is None:
        raise ValueError(
            f"accumulate ({config.accumulate}) is a number of towers a device, and num_towers "
            f"({config.num_towers}) one of all devices: give only one of them."
        )


def _limited(steps: int, max_steps: int | None) -> int:
    return steps if max_steps is None else min(steps, max_steps)


def _variable_device(kind: str) -> str:
    if kind == "gpu" and not devices_lib.has_gpus():
        raise ValueError(
            "variable_device=gpu: TensorFlow sees no GPU on this machine. Use variable_device=cpu."
        )
    return f"/{kind}:0"
