"""Finds a number of towers whose first step fits into memory, for num_towers=auto.

estimated memory  -->  number of towers  -->  first step  -->  all variables as before it
                              ^                   |
                              +----- doubled -----+  out of memory

The step comes before the run's directory exists. The run then begins as with the number given.
"""

import dataclasses
import gc
from functools import partial
from pathlib import Path

import tensorflow as tf

from towers.app.diagnosis.liveness import tower_memory
from towers.app.diagnosis.memory import of_towers
from towers.app.reporting.report import Report, labelled
from towers.app.training.build import Run
from towers.app.training.failures import is_exhausted
from towers.divide.prefetch import prefetched
from towers.machine.terminal import CapturedStderr
from towers.machine.words import counted
from towers.resume.epoch import Epoch
from towers.resume.random_state import random_state, set_random_state
from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.step.errors import NonFiniteError, values_explained
from towers.step.sharding import shard_sizes

_LESS = 0.9  # of the activations: else more towers do not help


def with_enough_towers(run: Run, out: Report, captured: CapturedStderr | None) -> Run:
    """Returns the run with a number of towers with which its first step fits into memory.

    captured: has TensorFlow's messages. With --plan, and without training, no step is made: the
    number follows from the estimate.

    Raises ValueError if more towers would not help.
    """
    run.step.build_metrics("train", *run.train.specs)
    run = _with_towers(run, _first_number(run))
    while not run.config.plan and run.num_steps > 0 and not _fits(run, captured):
        run = _doubled(run, out)
        gc.collect()  # TensorFlow frees a step's graph and copies when nothing refers to them
    return _with_towers(run, run.step.num_towers)


def _num_groups(run: Run) -> int:
    """Returns the number of devices, or of groups of them, that run towers."""
    return len(run.step.devices) // run.config.gpus_per_tower


def _size(run: Run) -> int:
    """Returns the number of examples in the largest batch."""
    return min(run.batch_size, run.train.num_examples)


def _first_number(run: Run) -> int:
    """Returns the smallest number of towers that is estimated to fit.

    It is one for each device if a device's memory is unknown, or if no number seems to fit.
    """
    size, num_groups = _size(run), _num_groups(run)
    tower = tower_memory(run.step.phases(), max(shard_sizes(size, num_groups)))
    for num_towers in range(num_groups, size + num_groups, num_groups):
        rows = max(shard_sizes(size, num_towers))
        devices = of_towers(run.step, tower.with_rows(rows), num_towers).values()
        if all(device.limit is not None and rows <= (device.most_rows or 0) for device in devices):
            return num_towers
    return num_groups


def _with_towers(run: Run, num_towers: int) -> Run:
    """Returns the run with a new step for so many towers."""
    make_step = partial(run.make_step, num_towers=num_towers)
    # Towers of one device take turns, also when the run continues.
    config = dataclasses.replace(
        run.config, num_towers=num_towers, accumulate=num_towers // _num_groups(run)
    )
    step = run.step
    # Noise of tf.random cannot be set back, but begins again in a new step.
    if num_towers != step.num_towers or step.has_unsaved_noise:
        with tf.device(step.parameter_device):
            step = make_step()
    return run._replace(config=config, step=step, make_step=make_step)


def _fits(run: Run, captured: CapturedStderr | None) -> bool:
    """Makes the first step, takes its effects back, and returns whether the memory was enough."""
    step = run.step
    step.build_metrics("train", *run.train.specs)
    variables, random = variables_of(step), random_state()
    before = copy_arrays(variables)
    try:
        batches = run.train.batches(Epoch(run.batch_size, run.config.seed, rows=step.own_rows))
        batch = next(iter(prefetched(step, batches)))
        with values_explained("step 1"):
            float(step.train_batch(**batch._asdict())["loss"])
    except NonFiniteError:
        return True  # the run's first step raises it, too
    except tf.errors.OpError as error:
        if not is_exhausted(error, "" if captured is None else captured.text()):
            raise
        return False
    finally:
        assign_arrays(variables, before, Path())
        set_random_state(random)
    return True


def _doubled(run: Run, out: Report) -> Run:
    """Returns the run with twice as many towers; raises ValueError if that would not help."""
    num_towers, size = run.step.num_towers, _size(run)
    rows = max(shard_sizes(size, num_towers))
    lack = f"a device has too little memory for {counted(rows, 'example')} a tower"
    if rows == 1:
        raise ValueError(
            f"num_towers=auto: {lack}. Use a smaller model, or divide its layers among GPUs with "
            "`gpus_per_tower`."
        )
    now = tower_memory(run.step.phases(), rows)
    then = now.with_rows(max(shard_sizes(size, 2 * num_towers)))
    count = num_towers // _num_groups(run)
    if then.activations(2 * count) > _LESS * now.activations(count):
        raise ValueError(
            f"num_towers=auto: {lack}, and more towers need as much, because they meet between "
            f"the forward and the backward pass. Use a smaller `batch_size` than {size:,}, or "
            "batch_norm=average if the model has BatchNormalization."
        )
    out.line(labelled("Towers", f"{lack}: trying {2 * num_towers} towers instead of {num_towers}"))
    return _with_towers(run, 2 * num_towers)
