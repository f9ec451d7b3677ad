"""Builds a Run from a TrainConfig: its devices, data, model and update step."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.app.config import TrainConfig
from towers.app.datasets.batches import Examples, load_examples
from towers.app.datasets.dataset import Dataset
from towers.app.datasets.image_folder import describe_shape
from towers.app.datasets.pixels import scale_for_model
from towers.app.datasets.weighting import weighed
from towers.app.machine_fields import AUTO
from towers.app.named import one_line
from towers.app.recipe.compiled_model import directions, recompile
from towers.app.recipe.model_changes import freeze, take_values
from towers.app.recipe.optimizer import make_optimizer, override_optimizer, schedule_notes
from towers.app.training.device_speeds import place_by_speed
from towers.app.training.task import UserObjects, find_source, make_model_and_data
from towers.app.training_fields import FAST_STEPS
from towers.divide.tower_step import TowerStep
from towers.machine import devices as devices_lib, places
from towers.machine.devices import Policy, device_kind, has_started, is_gpu, policy_of
from towers.machine.gpus import gpu_devices
from towers.machine.logical import logical_gpus, undivided_cpu
from towers.resume.epoch import num_steps
from towers.app.monitor import Monitor, find_monitor
from towers.step.compiled import COMPILED, check_steps
from towers.step.placement import Placement
from towers.step.structures import symbolic
from towers.workers.workers import Workers, join_workers


class Run(NamedTuple):
    """Holds the objects that a configuration describes, built for this machine.

    The configuration has the number of towers, the global batch and the CPU threads filled in: on
    other devices, they still define the same run.
    """

    config: TrainConfig
    step: TowerStep  # the update step, with the model
    train: Examples
    test: Examples | None
    batch_size: int  # the global batch
    steps_an_epoch: int  # updates; the last batch may be uneven
    workers: Workers
    make_step: Callable[..., TowerStep]  # builds an equivalent step with changed arguments
    metrics: Sequence[str]  # "loss" and the names of the metrics
    columns: Sequence[str]  # the names of an epoch's values in results.csv
    monitor: Monitor
    custom_loss: bool  # whether the model was compiled, with its loss, metrics and optimizer
    first_iteration: int  # the updates that the optimizer had counted before this run
    notes: Sequence[str]
    class_names: Sequence[str]  # by label; () if the data have no names
    divided: Sequence[bool]  # for each part of x, whether its pixels were divided by 255, or []
    tower_seconds: Mapping[str, float]  # of one tower on each device; {} if not measured
    warnings: Sequence[str]

    @property
    def num_steps(self) -> int:
        """Returns the number of updates in the run, at most --max_steps."""
        steps = self.config.num_steps(self.steps_an_epoch)
        return min(steps, FAST_STEPS) if self.config.fast_dev_run else steps


def build(config: TrainConfig, objects: UserObjects = UserObjects()) -> Run:
    """Builds the data, the model and the update step that a configuration describes.

    It traces a compiled model, to learn the names of its metrics, and no other model. If the
    configuration does not fit the machine, the data or the model, it raises ValueError.
    """
    begun = places.here()  # a function that makes the data may move the process
    devices = find_devices(config)
    policy, parameter_device = _find_policy(config, devices)
    source = find_source(config, objects)
    model, dataset = make_model_and_data(config, source, objects, parameter_device)
    dataset = scale_for_model(dataset, model)
    train = load_examples(dataset.train, config, dataset.restored, config.augment)
    # The test examples are never augmented.
    test = None if dataset.test is None else load_examples(dataset.test, config, dataset.restored)
    num_devices = len(devices) * join_workers().num_workers
    batch_size = config.global_batch_size(num_devices)
    steps_an_epoch = num_steps(train.num_examples, batch_size)
    custom_loss = model.compiled
    with tf.device(parameter_device):
        if not model.built:
            model(tf.nest.map_structure(symbolic, train.specs[0]))
        train, weights = weighed(train, config.class_weight, model, dataset.num_classes)
        changes = _prepare_model(model, config, begun, source.optimizer, steps_an_epoch)
        make_step = _step_maker(config, model, devices, policy, train, batch_size, custom_loss)
        tower_seconds: Mapping[str, float] = {}
        if config.towers_per_device == AUTO:
            config, tower_seconds = place_by_speed(config, make_step, devices, train, batch_size)
            make_step = partial(make_step, towers_per_device=config.tower_counts)
        step = make_step()
    better = _directions(step, train) if custom_loss else {"loss": "down", "accuracy": "up"}
    columns = [*better, *(f"val_{name}" for name in better if test is not None)]
    columns += ["noise_scale"] if config.noise_scale else []
    monitor = find_monitor(config.monitor, config.monitor_mode, better, columns)
    run = Run(
        config=config,
        step=step,
        train=train,
        test=test,
        batch_size=batch_size,
        steps_an_epoch=steps_an_epoch,
        workers=step.cluster,
        make_step=make_step,
        metrics=list(better),
        columns=columns,
        monitor=monitor,
        custom_loss=custom_loss,
        first_iteration=int(step.optimizer.iterations),
        notes=[*dataset.notes, *weights, *changes],
        class_names=dataset.class_names,
        divided=dataset.divided_for_model,
        tower_seconds=tower_seconds,
        warnings=[*dataset.warnings, *_warn_of_undivided_cpu(config, step)],
    )
    return run._replace(config=_resolved(run, dataset, parameter_device))


def _step_maker(
    config: TrainConfig,
    model: keras.Model,
    devices: Sequence[str],
    policy: Policy,
    train: Examples,
    batch_size: int,
    custom_loss: bool,
) -> Callable[..., TowerStep]:
    """Returns a function that makes the step of a prepared model, or one with changed arguments."""
    jit_compile = COMPILED if custom_loss and config.jit_compile == AUTO else config.jit_compile
    return partial(
        TowerStep,
        model,
        devices=devices,
        num_towers=config.num_towers_on(len(devices) * join_workers().num_workers),
        batch_norm=config.batch_norm,
        nonfinite=config.nonfinite,
        jit_compile=jit_compile,
        strategy=config.strategy,
        gpus_per_tower=config.gpus_per_tower,
        stages=config.stage_names,
        towers_per_device=config.tower_counts,
        add_on=config.add_on,
        policy=policy,
        noise_scale=config.noise_scale,
        own_rows=reads_own_rows(train),
        batch_size=min(batch_size, train.num_examples),
    )


@contextmanager
def keras_settings(config: TrainConfig) -> Iterator[None]:
    """Sets what Keras and TensorFlow share in a process; the dtype policy only inside."""
    if config.deterministic:  # before the first kernel, and the first random number
        keras.utils.set_random_seed(config.seed)
        tf.config.experimental.enable_op_determinism()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def _check_counts(config: TrainConfig) -> None:
    """Raises ValueError if the number of towers is given twice."""
    # A resumed run has both, because its towers may now be on other devices.
    if config.accumulate is not None and config.num_towers is not None and config.resume is None:
        raise ValueError(
            f"accumulate ({config.accumulate}) is a number of towers a device, and num_towers "
            f"({config.num_towers}) one of all devices: give only one of them."
        )


def _find_policy(config: TrainConfig, devices: Sequence[str]) -> tuple[Policy, str]:
    """Returns the policy of the devices, and the device that holds the parameters."""
    _check_counts(config)
    policy = policy_of(devices)
    # With a copy on each device, the first device's copy is the one that is saved. Devices that
    # share the CPU's memory need no copies.
    makes_copies = placement_of(config).makes_copies(policy)
    parameter_device = devices[0] if makes_copies else f"/{config.variable_device}:0"
    if is_gpu(parameter_device) and not devices_lib.has_gpus():
        raise ValueError(
            "variable_device=gpu: TensorFlow sees no GPU on this machine. Use variable_device=cpu."
        )
    # Towers on one device take turns, even on a CPU.
    if config.accumulate is not None or config.num_towers == AUTO:
        policy = dataclasses.replace(policy, take_turns=True)
    return policy, parameter_device


def _resolved(run: Run, dataset: Dataset, parameter_device: str) -> TrainConfig:
    """Returns the configuration with all that this machine, the model and the data decided.

    config.json holds it, so that a run that resumes on another machine is still the same run.
    """
    config, step = run.config, run.step
    begins = config.resume is None and dataset.name == "image_folder"  # resumed runs keep the size
    return dataclasses.replace(
        config,
        num_towers=step.num_towers,
        batch_size=run.batch_size,
        batch_size_per_gpu=None,
        image_size=describe_shape(dataset.input_shape) if begins else config.image_size,
        variable_device="gpu" if is_gpu(parameter_device) else "cpu",
        batch_norm=step.batch_norm,
        cpu_threads=devices_lib.intra_op_threads() if step.policy.divide_cores else None,
        monitor=run.monitor.column,
    )


def _warn_of_undivided_cpu(config: TrainConfig, step: TowerStep) -> list[str]:
    """Returns a line if several towers share one CPU device, unless the user placed them so."""
    if config.num_gpus is not None or config.accumulate is not None:
        return []
    line = undivided_cpu(len(step.local_towers), config.num_towers is not None)
    return [line] if line else []


def _prepare_model(
    model: keras.Model, config: TrainConfig, begun: Path, optimizer: str, steps_an_epoch: int
) -> list[str]:
    """Changes a built model as configured, and compiles it; returns lines about the changes.

    A compiled model keeps its loss and metrics, and any other model becomes a classifier. begun:
        the directory where relative paths begin. optimizer: the name of the model's default one.
    """
    notes = []
    if config.init_from is not None:
        notes += take_values(model, config, begun)
    if config.freeze is not None:
        notes.append(freeze(model, config.freeze))
    if model.compiled:
        check_steps(model)
        found = override_optimizer(model.optimizer, config, steps_an_epoch)
        if found is not model.optimizer:
            recompile(model, found)
    else:  # by the names of Keras, so that its file loads without towers
        found = make_optimizer(config, config.optimizer or optimizer, steps_an_epoch)
        model.compile(found, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return notes + (schedule_notes(config, steps_an_epoch) if config.has_schedule else [])


def reads_own_rows(examples: Examples) -> bool:
    """Whether each of several workers reads only its towers' examples."""
    takes_time = examples.source.how != "" or examples.augment is not None
    can_choose = join_workers().num_workers > 1 and examples.source.reads_rows
    return can_choose and takes_time


def _directions(step: TowerStep, examples: Examples) -> Mapping[str, str | None]:
    """Returns "up", "down" or None (unknown) for the loss and each metric of a compiled model.

    It traces a tower and its metrics, so that examples that do not fit are a ValueError now.
    """
    try:
        step.build_metrics("train", *examples.specs)
        for name, value in step.metrics.result().items():
            if tf.convert_to_tensor(value).shape.rank != 0:
                raise ValueError(
                    f"metric {name!r} is of shape {value.shape}, but a column of results.csv holds "
                    "one number: give the metric an average, or leave it out"
                )
    except (ValueError, TypeError, KeyError, IndexError) as error:
        reason = one_line(error)[:300]  # a Keras error may print whole structures
        raise ValueError(
            f"model ({step.model.name!r}) cannot be trained on these data: {reason}."
        ) from error
    return directions(step.model, step.metrics.names)


def placement_of(config: TrainConfig) -> Placement:
    """Returns where parameters and layers are; raises ValueError if flags do not go together."""
    return Placement(
        config.strategy,
        config.gpus_per_tower,
        config.stage_names,
        towers_per_device=config.tower_counts,
        add_on=config.add_on,
    )


def find_devices(config: TrainConfig) -> list[str]:
    """Returns the devices of this worker that run towers, at most `gpus_per_tower` for each tower.

    It divides the GPUs into `logical_gpus` if that is set, and sets the threads of `cpu_threads`.
    If the machine or a TensorFlow that has started does not fit them, it raises ValueError.
    """
    each, counts, workers = config.gpus_per_tower, config.tower_counts, join_workers()
    num_gpus, num_towers = config.num_gpus, config.fixed_towers
    if counts is not None:
        num_gpus = num_gpus or len(counts) * each
        num_towers = num_towers or sum(counts) * workers.num_workers
    placement_of(config).check_jit_compile(config.jit_compile)
    if config.logical_gpus is not None:
        logical_gpus(config.logical_gpus)
    threads = config.cpu_threads if device_kind(config.device) == "cpu" else None
    if threads is not None and not has_started():
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    devices = gpu_devices(
        num_gpus,
        num_towers,
        each,
        device=config.device,
        name="num_gpus",
        may_share=False,
    )
    if threads not in (None, devices_lib.intra_op_threads()):
        raise ValueError(
            f"cpu_threads ({threads}): TensorFlow has already started with "
            f"{devices_lib.intra_op_threads()}, which gives other bits. Begin a new process."
        )
    placement_of(config).num_groups(len(devices))
    if num_towers is None:
        return devices
    return devices[: workers.most_towers(num_towers) * each]
