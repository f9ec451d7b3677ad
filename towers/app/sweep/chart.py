"""sweep.png: time and accuracy against the global batch, a line for each GPU count."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from towers.app.reporting.chart_style import COLORS, drawn, style_axes
from towers.app.sweep.advice import break_even, compared, gpu_counts
from towers.app.sweep.cells import Machine
from towers.app.sweep.table import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_EXAMPLES = 10_000  # whose training time is drawn: an epoch's order of size, for any --max_steps
_WIDE = 4.0  # ratio of slowest to fastest from which the time's axis is logarithmic


def draw_sweep(path: Path, rows: Sequence[Row], title: str, note: str, machine: Machine) -> None:
    """A row of two panels for each model; without a cell done, there is no picture.

    Args:
        path: of the PNG.
        rows: all cells, with speed-ups.
        title, note: what is on top.
        machine: what the cells ran on.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    done = [row for row in rows if not row.error]
    models = list(dict.fromkeys(row.model for row in done))
    if not models:
        return
    with drawn(path, 11.0, 0.9 + 3.8 * len(models), title, note) as figure:
        panels = figure.subplots(len(models), 2, squeeze=False)
        for model, (time, accuracy) in zip(models, panels, strict=True):
            shown = [row for row in done if row.model == model]
            _draw_model(time, accuracy, shown, machine)
            x_label = "global batch (examples of one update)"
            style_axes(
                time, f"{model}: time", x_label, f"seconds for {_EXAMPLES:,} training examples"
            )
            style_axes(accuracy, f"{model}: accuracy", x_label, "validation accuracy")


def _draw_model(time: "Axes", accuracy: "Axes", rows: Sequence[Row], machine: Machine) -> None:
    counts = gpu_counts(rows)
    for index, count in enumerate(counts):
        own = sorted((row for row in rows if row.num_gpus == count), key=lambda r: r.batch_size)
        color = COLORS[index % len(COLORS)]
        seconds = {
            r.batch_size: _EXAMPLES / r.examples_per_second for r in own if r.examples_per_second
        }
        smallest = break_even(rows, count) if count > 1 else None
        label = machine.devices(count) + _pays(rows, count, smallest)
        time.plot(list(seconds), list(seconds.values()), "o-", color=color, label=label)
        if smallest is not None:
            time.plot([smallest], [seconds[smallest]], "o", markersize=12 + 4 * index,
                      fillstyle="none", color=color, markeredgewidth=2)
        # The accuracy hardly depends on the GPU count: of two lines the lower one is the wider.
        accuracies = {r.batch_size: r.val_accuracy for r in own if r.val_accuracy is not None}
        wider = len(counts) - 1 - index
        accuracy.plot(list(accuracies), list(accuracies.values()), "o-", color=color,
                      linewidth=1.5 + 1.2 * wider, markersize=5 + 2 * wider,
                      label=machine.devices(count))
    for axes in (time, accuracy):
        _style_batches(axes, sorted({row.batch_size for row in rows}))
        axes.legend(frameon=False)
    _style_time(time)


def _style_time(axes: "Axes") -> None:
    """From zero on; logarithmic where the slowest would press the others to the ground."""
    from matplotlib.ticker import FuncFormatter

    slowest, fastest = axes.dataLim.y1, axes.dataLim.y0
    if slowest > _WIDE * fastest > 0:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    else:
        axes.set_ylim(0, 1.1 * slowest)


def _pays(rows: Sequence[Row], count: int, smallest: int | None) -> str:
    if count == 1 or not compared(rows, count):
        return ""
    return f", faster than 1 from {smallest:,} on" if smallest else ", not faster than 1"


def _style_batches(axes: "Axes", batches: Sequence[int]) -> None:
    """A logarithmic axis to base 2, with a tick at each batch that was run."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{size:,}" for size in batches])
    axes.set_xticks([], minor=True)
    axes.set_xlim(batches[0] / 1.2, batches[-1] * 1.2)
