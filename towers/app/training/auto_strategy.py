"""`strategy="auto"`: one set of parameters on the first GPU, or a copy on each, as is faster here.

    first batch:   parameter_server   warm-up, 3 steps timed
                   mirrored           warm-up, 3 steps timed       taken where it is 5% faster

Both have the same bits: which one is taken, a matter of milliseconds, changes no result.
"""

import dataclasses
import itertools
import math
import time
from pathlib import Path

import tensorflow as tf

from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.app.config import AUTO
from towers.app.datasets.batches import shuffled_batches
from towers.step import TowerStep
from towers.step.nonfinite import NonFiniteError
from towers.step.prefetch import prefetched
from towers.app.training.build import Run

_NUM_STEPS = 3
_FASTER = 0.95  # of the other's time: what noise alone does not explain


def with_faster_strategy(run: Run) -> Run:
    """The run with the strategy that is to be found; one that names its own stays as it is.

    Where devices share one memory there is nothing to measure.

    Raises:
        ValueError: the number of towers is to be found, too, or there are several workers.
    """
    config = run.config
    if config.strategy != AUTO:
        return run
    if run.step.cluster.num_workers > 1:
        raise ValueError(
            f"strategy={AUTO} times one worker's devices, and there are "
            f"{run.step.cluster.num_workers} workers. Give parameter_server or mirrored."
        )
    measured = run.step.strategy.num_copies and not (
        config.plan or config.profile or config.epochs == 0
    )
    if not measured:
        chosen = "mirrored" if run.step.strategy.num_copies else "parameter_server"
        return run._replace(config=dataclasses.replace(config, strategy=chosen))
    turns = config.accumulate is not None
    server = run.make_step(run.step.num_towers, turns, "parameter_server")
    seconds = {
        "parameter_server": seconds_a_step(run, server),
        "mirrored": seconds_a_step(run, run.step),
    }
    is_faster = seconds["mirrored"] < _FASTER * seconds["parameter_server"]
    chosen = "mirrored" if is_faster else "parameter_server"
    note = f"strategy {chosen}; a step took " + ", ".join(
        f"{1000 * each:.1f} ms {name}" for name, each in seconds.items()
    )
    return run._replace(
        config=dataclasses.replace(config, strategy=chosen),
        step=run.step if is_faster else server,
        notes=[*run.notes, note],
    )


def seconds_a_step(run: Run, step: TowerStep) -> float:
    """Of the first batch, after one warm-up; infinite where a device has too little memory.

    Whatever the steps have changed is put back.
    """
    batches = shuffled_batches(run.train, run.batch_size, run.config.seed, epoch=0)
    step.build_metrics("train", *run.train.specs)
    before = copy_arrays(variables_of(step))
    first = itertools.islice(batches, 1)
    seconds = math.inf
    try:
        for batch in prefetched(step, first, to_devices=run.config.prefetch_to_devices):
            float(step.train_batch(**batch._asdict())["loss"])
            step.strategy.trust(True)
            begun = time.perf_counter()
            for _ in range(_NUM_STEPS):
                float(step.train_batch(**batch._asdict())["loss"])
            seconds = (time.perf_counter() - begun) / _NUM_STEPS
    except (tf.errors.ResourceExhaustedError, tf.errors.CancelledError):
        pass
    except NonFiniteError:  # the run itself will say so
        pass
    finally:
        step.strategy.trust(False)
        assign_arrays(variables_of(step), before, Path("the first steps"))
    return seconds
