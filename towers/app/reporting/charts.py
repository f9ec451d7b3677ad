"""Draws results.png, a run's loss and metrics by epoch, and defines the style of all charts.

matplotlib takes half a second to import, so it is imported only when a chart is drawn.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from towers.resume.run_dir import Result, write_atomically
from towers.resume.train_state import Monitor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_INK, _GRID = "#333333", "#dddddd"


@contextmanager
def figure_file(
    path: Path, width: float, height: float, title: str, note: str = ""
) -> Iterator["Figure"]:
    """Yields a figure to draw on, then writes it to `path` as a PNG in one atomic step.

    It opens no window and uses no global state of pyplot.

    Args: width, height: inches of 120 pixels each. note: lines in small print at the bottom.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=13, color=_INK)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", size=9.5, color="#666666")
    yield figure
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


def style_axes(axes: "Axes", title: str, x_label: str, y_label: str) -> None:
    """Gives a chart its title, axis labels, grid and colors."""
    axes.set_title(title, loc="left", size=11, color=_INK)
    axes.set_xlabel(x_label, color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)


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
