"""RUN/tensorboard/: the epochs' scalars, the graph of one step and histograms, for TensorBoard.

    tensorboard --logdir=runs

Keras' own callback does not fit: it draws the model, not the towers, needs hooks around every
batch, and a resumed run's epochs stand beside those that it repeats. tf.summary cannot tell
TensorBoard either that a run goes on from an earlier epoch. tensorboard's own EventFileWriter
(2.21) can, but names files by the second and a counter, whose order is not that of writing from the
tenth on; writes in a thread, which prints a traceback where the disk is full; and sums in Python,
0.3 s for each MB of a graph. So the events, plain protocol buffers, are given to TensorFlow's own
TFRecordWriter here.
"""

import importlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from towers.resume.run_dir import Result
from towers.step import TowerStep
from towers.app.training.listener import Listener

FOLDER = "tensorboard"  # in the run directory
NUM_BUCKETS = 30  # of a histogram: TensorBoard's own default

_SPEED, _LEARNING_RATE = "speed/examples_per_second", "speed/learning_rate"

_FILE_VERSION = "brain.Event:2"  # the first record of every event file; TensorBoard needs it


def check_installed() -> None:
    """Raises ValueError where the package that shows the log is missing."""
    try:
        importlib.import_module("tensorboard.version")
    except ImportError as error:
        raise ValueError(
            f"`tensorboard` needs the package tensorboard: {error}. Install it with: "
            "pip install 'tf-towers[tensorboard]'"
        ) from None


class TensorBoardLog(Listener):
    """Writes one event file for each process that trains; the step axis is the epoch, from 1.

    The file begins with the first epoch that ends, and tells TensorBoard to forget what earlier
    processes have written of this epoch and of later ones: a run that was killed and resumed, from
    whichever checkpoint, shows every epoch once. Each `write` is with the system when it returns.
    """

    phase = f"writing {FOLDER}"

    def __init__(
        self,
        directory: Path,
        step: TowerStep,
        warn: Callable[[str], None],
        histograms: bool = False,
    ) -> None:
        """
        Args:
            directory: of the event files; made when the first is written.
            step: what is trained; its graph, learning rate and parameters are written.
            warn: shows a message. Where the log cannot be written it is called, once, and training
                goes on without the log.
            histograms: write those of the trainable variables, too. Values that are not finite
                are left out.
        """
        self._directory, self._step, self._warn = directory, step, warn
        self._histograms = histograms
        self._file: tf.io.TFRecordWriter | None = None
        self._has_failed = False

    def end_epoch(self, result: Result, logs: dict[str, float]) -> None:
        """Writes the epoch."""
        self.write(result)

    def write(self, row: Result) -> None:
        """Adds an epoch: its scalars, the optimizer's learning rate now, and histograms.

        The first call adds the graph of one update as well.
        """
        if self._has_failed:
            return
        try:
            if self._file is None:
                self._file = self._open(row.epoch)
            self._add(self._file, step=row.epoch, summary=self._summary(row))
            self._file.flush()
        except (OSError, tf.errors.OpError) as error:
            self._has_failed = True
            reason = error.strerror if isinstance(error, OSError) else error.message.split("; ")[-1]
            self._warn(f"{self._directory} cannot be written ({reason}); training goes on.")

    def close(self) -> None:
        """Closes the file; nothing is lost without it."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except tf.errors.OpError:
            pass  # `write` has flushed what matters, or has warned

    def _open(self, epoch: int) -> tf.io.TFRecordWriter:
        """A new event file; of all files TensorBoard reads the one with the lowest name first."""
        self._directory.mkdir(parents=True, exist_ok=True)
        file = tf.io.TFRecordWriter(
            str(self._directory / f"events.out.tfevents.{time.time():017.6f}")
        )
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._add(file, file_version=_FILE_VERSION)
        self._add(file, step=epoch, session_log=start)  # forget this epoch and later ones
        graph = self._step.update_graph()
        if graph is not None:
            self._add(file, step=epoch, graph_def=graph.SerializeToString())
        return file

    def _add(self, file: tf.io.TFRecordWriter, **event: object) -> None:
        file.write(tf.compat.v1.Event(wall_time=time.time(), **event).SerializeToString())

    def _summary(self, row: Result) -> tf.compat.v1.Summary:
        scalars = {tag_of(column): value for column, value in row.values.items()}
        scalars[_SPEED] = row.examples_per_second
        scalars[_LEARNING_RATE] = float(self._step.optimizer.learning_rate)
        summary = tf.compat.v1.Summary()
        for tag, value in scalars.items():
            summary.value.add(tag=tag, simple_value=value)
        if self._histograms:
            for variable in self._step.trainable_variables:
                summary.value.add(tag=variable.path, histo=histogram(variable.numpy()))
        return summary


def tag_of(column: str) -> str:
    """"val_loss" -> "loss/validation": the first part groups a chart with others."""
    if column.startswith("val_"):
        return f"{column.removeprefix('val_')}/validation"
    return f"{column}/train"


def histogram(values: np.ndarray) -> tf.compat.v1.HistogramProto:
    """The histogram of the finite values, in NUM_BUCKETS buckets of equal width.

    Args:
        values: of any shape and float type.
    """
    flat = np.asarray(values, np.float64).ravel()
    flat = flat[np.isfinite(flat)]
    counts, edges = np.histogram(flat, NUM_BUCKETS)
    return tf.compat.v1.HistogramProto(
        min=flat.min() if flat.size else 0.0,
        max=flat.max() if flat.size else 0.0,
        num=flat.size,
        sum=flat.sum(),
        sum_squares=np.square(flat).sum(),
        bucket_limit=edges[1:],
        bucket=counts,
    )
