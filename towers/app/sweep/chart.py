"""Draws sweep.png: time and accuracy against the global batch, a line for each GPU count."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from towers.app.reporting.charts import COLORS, figure_file, style_axes
from towers.app.sweep.table import Row
from towers.machine.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXAMPLES = 10_000  # the chart shows their training time, whatever --max_steps is


def draw_sweep(path: Path, rows: Sequence[Row], title: str, note: str) -> None:
    """Draws two panels for each model with a finished cell, between a title and a note."""
    models = list(dict.fromkeys(row.model for row in rows))
    with figure_file(path, 11.0, 0.9 + 3.8 * len(models), title, note) as figure:
        panels = figure.subplots(len(models), 2, squeeze=False)
        for model, (time, accuracy) in zip(models, panels, strict=True):
            _draw_model(time, accuracy, [row for row in rows if row.model == model])
            x_label = "global batch (examples of one update)"
            style_axes(
                time, f"{model}: time", x_label, f"seconds for {_EXAMPLES:,} training examples"
            )
            style_axes(accuracy, f"{model}: accuracy", x_label, "validation accuracy")


def _draw_model(time: "Axes", accuracy: "Axes", rows: Sequence[Row]) -> None:
    counts = sorted({row.num_gpus for row in rows})
    for index, count in enumerate(counts):
        own = sorted((row for row in rows if row.num_gpus == count), key=lambda r: r.batch_size)
        batches, color = [row.batch_size for row in own], COLORS[index % len(COLORS)]
        seconds = [_EXAMPLES / (row.examples_per_second or 1.0) for row in own]
        label = counted(count, "device")
        time.plot(batches, seconds, "o-", color=color, label=label)
        # Accuracy hardly depends on the GPU count; wider lines below keep all lines visible.
        wider = len(counts) - 1 - index
        accuracy.plot(batches, [row.val_accuracy or 0.0 for row in own], "o-", color=color,
                      linewidth=1.5 + 1.2 * wider, markersize=5 + 2 * wider, label=label)
    ticks = sorted({row.batch_size for row in rows})
    for axes in (time, accuracy):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{size:,}" for size in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
        axes.legend(frameon=False)
    time.set_ylim(bottom=0)
