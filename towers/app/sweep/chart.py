"""Draws sweep.png: time and accuracy against the global batch, a line for each GPU count."""

from collections.abc import Sequence
from pathlib import Path

from towers.app.reporting.charts import figure_file
from towers.app.sweep.table import Row
from towers.machine.words import counted

_EXAMPLES = 10_000  # the chart shows their training time, whatever --max_steps is


def draw_sweep(path: Path, rows: Sequence[Row], title: str, note: str) -> None:
    """Draws two panels for each model with a finished cell, between a title and a note."""
    models = list(dict.fromkeys(row.model for row in rows))
    with figure_file(path, 11.0, 0.9 + 3.8 * len(models), title, note) as figure:
        panels = figure.subplots(len(models), 2, squeeze=False)
        for model, (time, accuracy) in zip(models, panels, strict=True):
            own = [row for row in rows if row.model == model]
            for i, count in enumerate(sorted({row.num_gpus for row in own})):
                points = [row for row in own if row.num_gpus == count]
                batches = [row.batch_size for row in points]
                # Circles of different sizes, because the accuracies may be equal.
                size, label = 5 + 3 * i, counted(count, "device")
                for axes, values in (
                    (time, [_EXAMPLES / (row.examples_per_second or 1) for row in points]),
                    (accuracy, [row.val_accuracy for row in points]),
                ):
                    axes.plot(batches, values, "o-", ms=size, fillstyle="none", label=label)
            sizes = sorted({row.batch_size for row in own})
            for axes in time, accuracy:
                axes.set_xscale("log", base=2)
                axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
                axes.minorticks_off()
                axes.set(title=model, xlabel="global batch (examples of one update)")
                axes.legend()
            time.set(ylabel=f"seconds for {_EXAMPLES:,} training examples", ylim=(0, None))
            accuracy.set(ylabel="validation accuracy")
