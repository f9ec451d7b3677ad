"""A device without enough memory: an error that names the ways out."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from towers.machine.words import plural
from towers.app.training.build import Run


@contextmanager
def out_of_memory_explained(run: Run, log: Path) -> Iterator[None]:
    """Turns a lack of memory in a step into a ValueError with the per-tower batch.

    A failure on one of several devices may arrive as the cancelled transfer to another: what it was
    stands in TensorFlow's own messages then, in the log.
    """
    try:
        yield
    except (tf.errors.ResourceExhaustedError, tf.errors.CancelledError) as error:
        if isinstance(error, tf.errors.CancelledError) and not _tells_of_no_memory(log):
            raise
        per_tower = math.ceil(run.batch_size / run.step.num_towers)
        raise ValueError(
            f"a device has too little memory for {per_tower:,} {plural('example', per_tower)} a "
            f"tower. Use a smaller `batch_size` than {run.batch_size:,}, or more towers than "
            f"devices, which take turns: num_towers={2 * run.step.num_towers}."
        ) from error


def _tells_of_no_memory(log: Path) -> bool:
    try:
        return "RESOURCE_EXHAUSTED" in log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
