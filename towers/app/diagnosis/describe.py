"""The lines before a run's first step: where everything is placed, and what is checked first."""

import keras
import tensorflow as tf

from towers import __version__
from towers.app.config import WARN
from towers.app.datasets.batches import ordered_batches, shuffled_batches
from towers.app.diagnosis import plan
from towers.app.diagnosis.verify import Verification, verify_gradients
from towers.machine.devices import has_gpus, is_gpu
from towers.machine.logical import shared_gpus, undivided_cpu
from towers.machine.policy import GPU, REHEARSAL, is_rehearsal
from towers.app.recipe.optimizer import given, shown_rate
from towers.app.reporting import report
from towers.app.reporting.report import Report
from towers.app.training.build import Run, training_loss


def describe(run: Run, out: Report, what: str) -> None:
    """Versions, devices, batch, data and model, a line each."""
    config, step = run.config, run.step
    versions = {"towers": __version__, "TensorFlow": tf.__version__, "Keras": keras.__version__}
    out.line(report.title_line(versions, what))
    if step.cluster.num_workers > 1:
        out.line(report.workers_line(step.cluster, step.num_towers))
    copies = step.strategy.num_copies
    stages = config.gpus_per_tower
    out.line(report.devices_line(step.home, step.tower_devices, step.mine.start, copies, stages))
    if not has_gpus():
        out.line(report.labelled("", "no GPU here: towers run on logical CPU devices"))
    if is_rehearsal():
        out.line(report.labelled("", f"{REHEARSAL}=1: they follow the policy of GPUs"))
    if step.compiles:
        out.line(report.labelled("", "XLA compiles the towers"))
    sharing = shared_gpus()
    if sharing is not None and is_gpu(step.tower_devices[0]):
        out.line(report.labelled("", sharing))
    out.line(report.batch_line(run.batch_size, step.num_towers, run.train.num_examples))
    num_test = None if run.test is None else run.test.num_examples
    data = report.data_line(config.dataset, run.train.num_examples, num_test)
    data += f", {how}" if (how := run.train.source.how) else ""
    out.line(data + (f"; augmented by {config.augment}" if config.augment else ""))
    optimizer = getattr(step.optimizer, "inner_optimizer", step.optimizer)
    out.line(
        report.model_line(
            config.model,
            step.model.count_params(),
            type(optimizer).__name__.lower(),
            shown_rate(optimizer, config),
            config.seed,
            config.precision,
        )
    )
    if run.own_task:
        smoothing = ["label_smoothing"] if config.label_smoothing is not None else []
        out.line(report.task_line(run.metrics, [*given(config), *smoothing]))
    for note in run.notes:
        out.line(report.labelled("", note))
    is_placed = config.num_gpus is not None or config.accumulate is not None
    shared = None if is_placed else undivided_cpu(len(step.mine))
    split = report.split_warning(run.batch_size, step.num_towers)
    for warning in [*run.warnings, shared, split]:
        if warning is not None:
            out.warn(warning)


def show_plan(run: Run, out: Report) -> None:
    """--plan: the transfers of a step, as on GPUs; or its stages."""
    spec, step = ordered_batches(run.train, run.batch_size).element_spec, run.step
    if step.stages:
        lines = plan.stage_table(plan.stage_traffic(step, run.batch_size, spec))
    else:
        batch = plan.full_batch(spec, run.batch_size)
        if step.policy.shares_memory:
            step = run.make_step(run.config.strategy, policy=GPU)
        lines = plan.table(plan.traffic(step, run.batch_size, batch))
        if run.step.policy.shares_memory:
            lines.append("Counted as on GPUs: logical CPU devices share one memory.")
    for line in lines:
        out.line(line)


def verified(run: Run) -> Verification:
    """--verify_gradients: the averaged gradient against the large batch's.

    Raises:
        ValueError: they differ, and nobody has asked to go on all the same.
    """
    batches = shuffled_batches(run.train, run.batch_size, run.config.seed, epoch=0)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(next(iter(batches)))
    loss, loss_weights = training_loss(run.step.model, run.config)
    # The run's own step would train on with the graph of this check, which has no noise.
    step = run.make_step("parameter_server")
    found = verify_gradients(step, loss, x, y, sample_weight, loss_weights)
    if found.error is not None and run.config.verify_gradients != WARN:
        raise ValueError(found.error)
    return found


def show_verified(found: Verification, out: Report) -> None:
    """Says the result of `verified`."""
    if found.cause:
        out.warn(f"{found}. The run goes on, as verify_gradients={WARN} asks for.")
    else:
        out.line(report.labelled("Verify", str(found)))
