"""Prints the lines before a run's first step, and the device report of --devices."""

import os
import platform
import sys

import keras
import tensorflow as tf

from towers import __version__
from towers.app.command_line import as_flags
from towers.app.config import TrainConfig, WARN
from towers.app.datasets.batches import ordered_batches, shuffled_batches
from towers.app.diagnosis import plan
from towers.app.diagnosis.verify import Verification, verify_gradients
from towers.app.recipe.optimizer import given, shown_rate
from towers.app.reporting.report import Report, devices_line, labelled
from towers.app.training.build import Run, find_devices, training_loss
from towers.machine import nvidia
from towers.machine.devices import (
    GPU, REHEARSAL, count_cores, has_gpus, intra_op_threads, is_gpu, is_rehearsal, place_towers,
)
from towers.machine.logical import shared_gpus
from towers.machine.words import counted
from towers.step.sharding import shard_sizes


def describe(run: Run, out: Report, what: str) -> None:
    """Prints versions, devices, batch, data and model, a line each; then the warnings."""
    config, step = run.config, run.step
    versions = ("towers", __version__), ("TensorFlow", tf.__version__), ("Keras", keras.__version__)
    short = [f"{name} {'.'.join(version.split('.')[:2])}" for name, version in versions]
    lines = [f"{short[0]} | {short[1]}, {short[2]} | {what}"]
    if (cluster := step.cluster).num_workers > 1:
        chief = ", the chief" if cluster.is_chief else ""
        each = _sizes(step.num_towers, cluster.num_workers)
        lines.append(labelled(
            "Workers", f"{cluster.num_workers}, this is {cluster.index}{chief}; {step.num_towers} "
            f"towers, {each} each; over gRPC without authentication: on private networks only"
        ))
    lines.append(devices_line(
        step.parameter_device, step.tower_devices, step.local_towers.start,
        step.strategy.num_copies, config.gpus_per_tower,
    ))
    if not has_gpus():
        lines.append(labelled("", "no GPU here: towers run on logical CPU devices"))
    if is_rehearsal():
        lines.append(labelled("", f"{REHEARSAL}=1: they follow the policy of GPUs"))
    if step.uses_xla:
        lines.append(labelled("", "XLA compiles the towers"))
    if (sharing := shared_gpus()) is not None and is_gpu(step.tower_devices[0]):
        lines.append(labelled("", sharing))
    split = batch_split(run.batch_size, step.num_towers, run.train.num_examples)
    lines.append(labelled("Batch", split))
    test = "no test examples" if run.test is None else f"{run.test.num_examples:,} test"
    data = f"{config.dataset}: {run.train.num_examples:,} train, {test}"
    data += f", {how}" if (how := run.train.source.how) else ""
    data += f"; augmented by {config.augment}" if config.augment else ""
    lines.append(labelled("Data", data))
    optimizer = getattr(step.optimizer, "inner_optimizer", step.optimizer)
    rate, name = shown_rate(optimizer, config), type(optimizer).__name__.lower()
    model = f"{config.model}, {step.model.count_params():,} parameters; {name}"
    model += f", learning rate {rate:.4g}; seed {config.seed}"
    model += f"; {config.precision}" if config.precision != "float32" else ""
    lines.append(labelled("Model", model))
    if run.custom_loss:
        smoothing = ["label_smoothing"] if config.label_smoothing is not None else []
        beside = " and ".join([*given(config), *smoothing])
        own = f"the model's own, as it was compiled: {', '.join(run.metrics)}"
        lines.append(labelled("Task", f"{own}; but {beside} as given beside it" if beside else own))
    for line in [*lines, *(labelled("", note) for note in run.notes)]:
        out.line(line)
    for warning in _warnings(run):
        out.warn(warning)


def _warnings(run: Run) -> list[str]:
    """Returns warnings about the data, the devices, and an unusual split of the batch."""
    size, num_towers, warnings = run.batch_size, run.step.num_towers, [*run.warnings]
    if size < num_towers:
        warnings.append(
            f"the global batch ({size:,}) is smaller than the {num_towers} towers: "
            f"{num_towers - size} without an example."
        )
    elif size % num_towers:
        warnings.append(
            f"the global batch ({size:,}) does not divide by the {num_towers} towers: every step "
            f"waits for those with {-(-size // num_towers):,}. The result is exact all the same."
        )
    return warnings


def batch_split(batch_size: int, num_towers: int, num_examples: int) -> str:
    """Returns "128 global = 8 towers x 16; 469 steps an epoch (last: 96 = 8 x 12)"."""
    steps, last = -(-num_examples // batch_size), num_examples % batch_size
    each = f"{counted(num_towers, 'tower')} x {_sizes(batch_size, num_towers)}"
    text = f"{batch_size:,} global = {each}; {counted(steps, 'step')} an epoch"
    return f"{text} (last: {last:,} = {num_towers} x {_sizes(last, num_towers)})" if last else text


def _sizes(count: int, num_parts: int) -> str:
    """Returns "16", or "12-13" if the parts differ."""
    sizes = shard_sizes(count, num_parts)
    return f"{sizes[0]:,}" if sizes[0] == sizes[-1] else f"{sizes[-1]:,}-{sizes[0]:,}"


def show_plan(run: Run, out: Report) -> None:
    """Prints --plan: the transfers of a step, counted as on GPUs, or its stages."""
    spec, step = ordered_batches(run.train, run.batch_size).element_spec, run.step
    if step.stages:
        lines = plan.stage_table(step, run.batch_size, spec)
    else:
        if step.policy.shares_memory:
            step = run.make_step(policy=GPU)
        lines = plan.table(plan.traffic(step, run.batch_size, spec))
        if run.step.policy.shares_memory:
            lines.append("Counted as on GPUs: logical CPU devices share one memory.")
    for line in lines:
        out.line(line)


def verified(run: Run) -> Verification:
    """Runs --verify_gradients: compares the averaged with the full-batch gradient.

    Raises:
        ValueError: the gradients differ, and verify_gradients is not `WARN`.
    """
    batches = shuffled_batches(run.train, run.batch_size, run.config.seed, epoch=0)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(next(iter(batches)))
    loss, loss_weights = training_loss(run.step.model, run.config)
    # A separate step, because the run's step would train with this check's graph, without noise.
    step = run.make_step(strategy="parameter_server")
    found = verify_gradients(step, loss, x, y, sample_weight, loss_weights)
    if found.error is not None and run.config.verify_gradients != WARN:
        raise ValueError(found.error)
    return found


def show_verified(found: Verification, out: Report) -> None:
    """Prints the result of `verified`."""
    if found.cause:
        out.warn(f"{found}. The run continues, because verify_gradients={WARN}.")
    else:
        out.line(labelled("Verify", str(found)))


def device_report(config: TrainConfig) -> list[str]:
    """Returns lines on the machine's devices. Starts TensorFlow with the configured devices.

    Args:
        config: its num_gpus, logical_gpus, num_towers, device and cpu_threads are tried.
    """
    versions = f" | TensorFlow {tf.__version__}, Keras {keras.__version__}"
    towers = _towers(config)  # before TensorFlow starts: it sets threads and logical devices
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    threads = counted(intra_op_threads(), "thread")
    cpu = f"{counted(count_cores(), 'core')}; {threads} in each operation"
    return [
        f"towers {__version__}{versions}",
        labelled("Python", f"{platform.python_version()} in {sys.prefix}"),
        *towers,
        *_gpus(visible),
        labelled("CPU", cpu),
    ]


def _towers(config: TrainConfig) -> list[str]:
    try:
        devices = find_devices(config)
        each = config.gpus_per_tower
        towers = place_towers(config.num_towers_on(len(devices)), devices[::each])
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        return [labelled("Devices", f"none: {as_flags(str(error))}")]
    lines = [devices_line(f"/{config.variable_device}:0", towers, stages=each)]
    if (sharing := shared_gpus()) is not None:
        lines.append(labelled("", sharing))
    return lines


def _gpus(visible: str | None) -> list[str]:
    """Returns lines on TensorFlow's GPUs, or why it sees none, then on the driver's GPUs."""
    listed, version = nvidia.driver_gpus(), nvidia.driver_version()
    build = tf.sysconfig.get_build_info()
    gpus = []
    for index, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        name = details.get("device_name", "unknown")
        capability = ".".join(map(str, details.get("compute_capability", ("unknown",))))
        gpus.append(f"/gpu:{index}  {name}, compute capability {capability}")
    if not gpus:
        has_driver = bool(listed or version)
        gpus = nvidia.why_no_gpu(tf.test.is_built_with_cuda(), has_driver, visible)
        gpus[0] = f"none: {gpus[0]}"
    driver = [version or ("not found" if listed is None else "found")]
    for known in listed or []:
        total, free = ("[N/A]" if m is None else m for m in (known.memory, known.free_memory))
        driver.append(f"GPU {known.number}  {known.name}, {total} MiB, {free} MiB free")
    cuda = "TensorFlow is built without it"
    if build.get("is_cuda_build"):
        numbers = (build.get(f"{name}_version", "unknown") for name in ("cuda", "cudnn"))
        cuda = "TensorFlow is built for CUDA {}, cuDNN {}".format(*numbers)
    blocks = ("GPUs", gpus), ("Driver", driver), ("CUDA", [cuda])
    return [
        labelled("" if index else label, line)
        for label, lines in blocks for index, line in enumerate(lines)
    ]
