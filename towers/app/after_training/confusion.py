"""Counts which classes a classifier takes for which, and draws the counts."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from towers.resume.epoch import Epoch
from towers.app.reporting.charts import figure_file, or_warning
from towers.app.reporting.report import Report, labelled
from towers.app.training.build import Run
from towers.app.training_fields import FAST_STEPS
from towers.step.structures import BatchTensor

FILE = "confusion.png"
_MOST_NAMED = 20  # classes whose names and counts can be read in the picture


def confusion_of_run(run: Run, directory: Path, out: Report) -> None:
    """Draws confusion.png for the test examples; if that fails, warns. All workers must call it."""
    with or_warning(FILE, out.warn):
        if run.test is None:
            raise ValueError("there are no test examples")
        batches = run.test.batches(Epoch(run.batch_size))
        counts = np.zeros((), int)
        for batch in islice(batches, FAST_STEPS if run.config.fast_dev_run else None):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
            counts = counts + count(y, run.step.predict_batch(x))
        if run.workers.is_chief:
            show(counts, directory / FILE, run.class_names, out)


def count(y: BatchTensor, outputs: np.ndarray) -> np.ndarray:
    """Returns the counts of a batch, int [classes, classes]: by label, then by predicted class.

    y: class indices [N] or [N, 1], or one-hot rows. outputs: [N, classes], or a probability [N, 1].

    Raises ValueError for other labels or outputs.
    """
    labels, found, classes = np.asarray(y), np.asarray(outputs), 0
    if found.ndim == 2:
        classes = max(2, found.shape[1])
    if labels.shape[1:] == (classes,):
        labels = labels.argmax(axis=1)
    if labels.size != len(outputs) or not np.isin(labels, range(classes)).all():
        raise ValueError(
            "a confusion matrix needs one class for each example and one output with a value for "
            f"each class; here y is {labels.dtype} {labels.shape}, the output {found.shape}."
        )
    predicted = found.argmax(axis=1)
    if found.shape[1] == 1:  # the probability of class 1
        predicted = found[:, 0] > 0.5
    return tf.math.confusion_matrix(labels.reshape(-1), predicted, classes).numpy()


def show(counts: np.ndarray, path: Path, class_names: Sequence[str], out: Report) -> None:
    """Draws the counts, int [classes, classes], and prints the three most frequent mistakes."""
    known = dict(enumerate(class_names))
    names = [str(known.get(label, label)) for label in range(len(counts))]
    share = counts / counts.sum(axis=1, keepdims=True).clip(1)
    with figure_file(path, 6.4, 6.4, f"{counts.sum():,} test examples") as figure:
        axes = figure.subplots()
        axes.imshow(share, cmap="Blues", vmin=0, vmax=1.8)  # dark numbers can be read on it
        axes.grid(visible=False)
        axes.set(xlabel="predicted class", ylabel="class")
        if len(names) <= _MOST_NAMED:
            shown = [name.replace("$", r"\$") for name in names]  # $ begins a formula
            axes.set_xticks(range(len(names)), shown, rotation="vertical" if known else None)
            axes.set_yticks(range(len(names)), shown)
            for (row, column), number in np.ndenumerate(counts):
                axes.text(column, row, number or "", ha="center", va="center", size="small")
    wrong = counts - np.diag(counts.diagonal())
    most = [np.unravel_index(i, wrong.shape) for i in wrong.argsort(axis=None)[:-4:-1]]
    listed = [f"{names[i]} as {names[j]}: {wrong[i, j]:,}" for i, j in most if wrong[i, j]]
    out.line(labelled("Confused", ", ".join(listed) or "no example"))
