"""Draws results.png: a run's loss and metrics, for training and validation, by epoch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from towers.app.reporting.chart_style import COLORS, figure_file, style_axes
from towers.resume.best import Monitor
from towers.resume.run_dir import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = "results.png"
_FEW = 30  # up to this number of epochs, each epoch gets a dot
_WIDE = 50.0  # above this ratio of largest to smallest loss, the axis is logarithmic
_IN_A_ROW = 3  # charts in a row
_UNITS = {"loss": " (mean over the examples)", "accuracy": " (share of the examples)"}


def draw_curves(
    path: Path, results: Sequence[Result], title: str, monitor: Monitor = Monitor()
) -> None:
    """Draws one chart for the loss and one for each metric; writes no file without epochs.

    Values that are not finite leave gaps; the monitor's best epoch is marked. Raises ImportError
    if matplotlib is missing, and OSError if the file cannot be written.
    """
    if not results:
        return
    best = monitor.best_index([result.values[monitor.column] for result in results])
    values = results[0].values
    validation = {f"val_{name}" for name in values}
    names = [name for name in values if name not in validation]
    width = min(len(names), _IN_A_ROW)
    height = -(-len(names) // width)
    with figure_file(path, 4.8 * max(2, width), 4.2 * height, title) as figure:
        charts = figure.subplots(height, width, squeeze=False).ravel()
        for axes in charts[len(names):]:
            axes.remove()
        for axes, name in zip(charts, names, strict=False):
            _draw(axes, results, name, None if best is None else results[best])
            style_axes(axes, name.capitalize(), "epoch", name + _UNITS.get(name, ""))


def _draw(axes: "Axes", results: Sequence[Result], name: str, best: Result | None) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = [result.epoch for result in results]
    curves = {"training": name, "validation": f"val_{name}"}
    shown = {label: column for label, column in curves.items() if column in results[0].values}
    finite, marker = [], "o" if len(results) <= _FEW else ""
    for color, (label, column) in zip(COLORS, shown.items(), strict=False):
        values = [result.values[column] for result in results]
        finite += [value for value in values if math.isfinite(value)]
        values = [value if math.isfinite(value) else math.nan for value in values]
        axes.plot(epochs, values, color=color, label=label, marker=marker, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    margin = max(0.5, 0.03 * (epochs[-1] - epochs[0]))
    axes.set_xlim(epochs[0] - margin, epochs[-1] + margin)
    if best is not None:
        axes.axvline(best.epoch, color="#999999", linestyle=":", zorder=1)
        value = best.values[column]  # the validation's value, if there is one
        if math.isfinite(value):
            axes.plot(
                [best.epoch], [value], "o", markersize=10, fillstyle="none", color=color,
                markeredgewidth=2, label=f"best, epoch {best.epoch}: {value:.4g}",
            )
    if name == "loss" and finite and 0 < min(finite) < max(finite) / _WIDE:
        axes.set_yscale("log")
    axes.legend(frameon=False)
