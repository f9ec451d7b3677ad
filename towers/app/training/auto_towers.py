"""`num_towers="auto"`: as few towers a device as its memory allows, found with the first step.

    8 devices:   8 towers -> 16 -> 32 -> ...   until the first step of the same global batch fits

More towers on a device take turns, and each needs the memory of a smaller shard; their averaged
gradient is the same.
"""

import dataclasses
import gc
import itertools
from pathlib import Path

import tensorflow as tf

from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.app.config import AUTO, TrainConfig
from towers.app.datasets.batches import shuffled_batches
from towers.workers.workers import join_workers
from towers.step.nonfinite import NonFiniteError
from towers.step.prefetch import prefetched
from towers.app.training.build import Run, build
from towers.app.training.memory import too_little
from towers.app.training.user_objects import UserObjects


def build_with_auto_towers(config: TrainConfig, objects: UserObjects = UserObjects()) -> Run:
    """`build`, and where the number of towers is to be found, that number.

    The run's state is that of its beginning, and its configuration holds the number, so that a run
    that goes on keeps it.

    Raises:
        ValueError: see `build`; or one example a tower is too much, too.
    """
    if config.num_towers != AUTO:
        return build(config, objects)
    workers = join_workers().num_workers
    if workers > 1:
        raise ValueError(
            f"num_towers={AUTO} looks at one worker's devices, and there are {workers} workers. "
            "Give a number."
        )
    run = build(config, objects)
    if config.plan or config.profile or config.epochs == 0:
        return run
    notes, at_first = run.notes, too_little(run)
    while (error := first_step_error(run)) is not None:
        if run.step.num_towers >= run.batch_size:
            raise ValueError(f"{too_little(run)}. Use a smaller model.") from error
        run = _with_towers(run, 2 * run.step.num_towers)
        note = f"{run.config.num_towers} towers, {run.config.accumulate} a device: {at_first}"
        run = run._replace(notes=[*notes, note])
    return run


def _with_towers(run: Run, num_towers: int) -> Run:
    """The run with another number of towers."""
    each = num_towers * run.config.gpus_per_tower // len(run.step.devices)
    config = dataclasses.replace(run.config, num_towers=num_towers, accumulate=each)
    gc.collect()  # what is left of a step before
    return run._replace(config=config, step=run.make_step(num_towers, True))


def first_step_error(run: Run) -> Exception | None:
    """The error of a device without enough memory in the first step; None: it has enough.

    A failure on one of several devices may arrive as the cancelled transfer to another. Whatever
    the step has changed is put back.
    """
    step = run.step
    batches = shuffled_batches(run.train, run.batch_size, run.config.seed, epoch=0)
    step.build_metrics("train", *run.train.specs)
    before = copy_arrays(variables_of(step))
    first = itertools.islice(batches, 1)
    try:
        for batch in prefetched(step, first, to_devices=run.config.prefetch_to_devices):
            float(step.train_batch(**batch._asdict())["loss"])
    except (tf.errors.ResourceExhaustedError, tf.errors.CancelledError) as error:
        return error.with_traceback(None)  # which would hold the step's values
    except NonFiniteError:  # the run itself will say so
        pass
    finally:
        assign_arrays(variables_of(step), before, Path("the first step"))
    return None
