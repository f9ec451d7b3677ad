"""Prints the lines before a run's first step, and the device report of --devices."""

import os
import platform
import sys

import keras
import tensorflow as tf

from towers import __version__
from towers.app.command_line import as_flags
from towers.app.config import TrainConfig
from towers.resume.epoch import Epoch
from towers.app.diagnosis import memory, plan
from towers.app.diagnosis.verify import Verification, verify_gradients
from towers.app.recipe.optimizer import given, shown_rate
from towers.app.reporting.report import Report, devices_line, labelled, slowest_line
from towers.app.training.build import Run, find_devices
from towers.app.training_fields import WARN
from towers.machine import nvidia
from towers.machine.devices import (
    GPU,
    REHEARSAL,
    count_cores,
    has_gpus,
    intra_op_threads,
    is_gpu,
    is_rehearsal,
    place_towers,
)
from towers.machine.logical import shared_gpus
from towers.machine.words import counted
from towers.step.sharding import shard_sizes
from towers.step.xla import FIXED_SHAPES


def describe(run: Run, out: Report, what: str) -> None:
    """Prints versions, devices, batch, data and model, a line each; then the warnings."""
    config, step = run.config, run.step
    versions = ("towers", __version__), ("TensorFlow", tf.__version__), ("Keras", keras.__version__)
    short = [f"{name} {'.'.join(version.split('.')[:2])}" for name, version in versions]
    lines = [f"{short[0]} | {', '.join(short[1:])} | {what}"]
    if (cluster := step.cluster).num_workers > 1:
        chief = ", the chief" if cluster.is_chief else ""
        each = plan.span(shard_sizes(step.num_towers, cluster.num_workers))
        lines.append(
            labelled(
                "Workers",
                f"{cluster.num_workers}, this is {cluster.index}{chief}; {step.num_towers} "
                f"towers, {each} each; over gRPC without authentication: on private networks only",
            )
        )
    lines.append(
        devices_line(
            step.parameter_device,
            step.tower_devices,
            step.local_towers.start,
            step.strategy.num_copies,
            config.gpus_per_tower,
        )
    )
    notes = [
        not has_gpus() and "no GPU here: towers run on logical CPU devices",
        is_rehearsal() and f"{REHEARSAL}=1: they follow the policy of GPUs",
        step.uses_xla is True and "XLA compiles the towers",
        step.uses_xla == FIXED_SHAPES and "XLA compiles the towers for sequences of one length",
        is_gpu(step.tower_devices[0]) and shared_gpus(),
    ]
    lines += [labelled("", note) for note in notes if note]
    if run.tower_seconds:
        lines.append(slowest_line(run.tower_seconds, step.tower_devices))
    size, num_towers, num_examples = run.batch_size, step.num_towers, run.train.num_examples
    lines.append(labelled("Batch", batch_split(size, num_towers, num_examples)))
    test = "no test examples" if run.test is None else f"{run.test.num_examples:,} test"
    data = f"{config.dataset}: {num_examples:,} train, {test}"
    data += f", {how}" if (how := run.train.source.how) else ""
    data += f"; augmented by {config.augment}" if config.augment else ""
    lines.append(labelled("Data", data))
    optimizer = getattr(step.optimizer, "inner_optimizer", step.optimizer)
    model = f"{config.model}, {step.model.count_params():,} parameters"
    model += f"; {type(optimizer).__name__.lower()}"
    model += f", learning rate {shown_rate(optimizer, config):.4g}; seed {config.seed}"
    model += f"; {config.precision}" if config.precision != "float32" else ""
    lines.append(labelled("Model", model))
    if run.custom_loss:
        beside = " and ".join(given(config))
        own = f"the model's own, as it was compiled: {', '.join(run.metrics)}"
        lines.append(labelled("Task", f"{own}; but {beside} as given beside it" if beside else own))
    for line in [*lines, *(labelled("", note) for note in run.notes)]:
        out.line(line)
    for warning in run.warnings:
        out.warn(warning)
    if size % num_towers:
        each = plan.span(shard_sizes(size, num_towers))
        out.warn(
            f"the global batch ({size:,}) does not divide by the {num_towers} towers, which get "
            f"{each} examples. Each step takes as long as the largest share. The result is exact."
        )


def batch_split(batch_size: int, num_towers: int, num_examples: int) -> str:
    """Returns "128 global = 8 towers x 16; 469 steps an epoch (last: 96 = 8 x 12)"."""
    steps, last = -(-num_examples // batch_size), num_examples % batch_size
    each, of_last = (plan.span(shard_sizes(size, num_towers)) for size in (batch_size, last))
    text = f"{batch_size:,} global = {counted(num_towers, 'tower')} x {each}"
    text += f"; {counted(steps, 'step')} an epoch"
    return f"{text} (last: {last:,} = {num_towers} x {of_last})" if last else text


def show_plan(run: Run, out: Report) -> None:
    """Prints --plan: the transfers of a step, counted as on GPUs, or its stages; then its layers."""
    spec, step = run.train.batches(Epoch(run.batch_size)).element_spec, run.step
    if step.stages:
        lines = plan.stage_table(step)
    elif step.policy.shares_memory:
        step = run.make_step(policy=GPU)
        lines = plan.table(plan.traffic(step, run.batch_size, spec))
        lines.append("Counted as on GPUs: logical CPU devices share one memory.")
    else:
        lines = plan.table(plan.traffic(step, run.batch_size, spec))
    if not step.stages:
        lines += memory.memory_table(memory.device_memory(step, run.batch_size))
    lines += plan.layer_table(step, run.batch_size)
    once = step.ran_once
    lines += ["Computed once for the whole batch, not in every tower:"] * bool(once)
    for line in [*lines, *map(str, once)]:
        out.line(line)


def verified(run: Run) -> Verification:
    """Runs --verify_gradients; raises ValueError if gradients differ, unless it is `WARN`."""
    batches = run.train.batches(Epoch(run.batch_size, run.config.seed))
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(next(iter(batches)))
    # A separate step, because the run's step would train with this check's graph, without noise.
    step = run.make_step(strategy="parameter_server", own_rows=False)
    found = verify_gradients(step, x, y, sample_weight)
    if found.error is not None and run.config.verify_gradients != WARN:
        raise ValueError(found.error)
    return found


def device_report(config: TrainConfig) -> list[str]:
    """Returns lines on the machine's devices. Starts TensorFlow with the configured devices."""
    try:  # first, because it sets threads and logical devices before TensorFlow starts
        devices, each = find_devices(config), config.gpus_per_tower
        towers = place_towers(
            config.num_towers_on(len(devices)), devices[::each], config.tower_counts
        )
        placed = [devices_line(f"/{config.variable_device}:0", towers, stages=each)]
        if (sharing := shared_gpus()) is not None:
            placed.append(labelled("", sharing))
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        placed = [labelled("Devices", f"none: {as_flags(str(error))}")]
    gpus = []
    for index, gpu in enumerate(tf.config.list_physical_devices("GPU")):
        details = tf.config.experimental.get_device_details(gpu)
        name = details.get("device_name", "unknown")
        capability = ".".join(map(str, details.get("compute_capability", ("unknown",))))
        gpus.append(f"/gpu:{index}  {name}, compute capability {capability}")
    listed, version = nvidia.driver_gpus(), nvidia.driver_version()
    if not gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = nvidia.why_no_gpu(tf.test.is_built_with_cuda(), bool(listed or version), visible)
        gpus[0] = f"none: {gpus[0]}"
    driver = [version or ("not found" if listed is None else "found")]
    for known in listed or []:
        total, free = ("[N/A]" if m is None else m for m in (known.memory, known.free_memory))
        driver.append(f"GPU {known.number}  {known.name}, {total} MiB, {free} MiB free")
    threads = counted(intra_op_threads(), "thread")
    return [
        f"towers {__version__} | TensorFlow {tf.__version__}, Keras {keras.__version__}",
        labelled("Python", f"{platform.python_version()} in {sys.prefix}"),
        *placed,
        *map(labelled, ["GPUs", *[""] * (len(gpus) - 1)], gpus),
        *map(labelled, ["Driver", *[""] * (len(driver) - 1)], driver),
        labelled("CPU", f"{counted(count_cores(), 'core')}; {threads} in each operation"),
    ]
