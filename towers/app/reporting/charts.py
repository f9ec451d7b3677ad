"""Draws results.png, a run's loss and metrics by epoch, and defines the style of all charts.

matplotlib takes half a second to import, so it is imported only when a chart is drawn.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from towers.resume.run_dir import write_atomically
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

    Its size is in inches of 120 pixels. The `note` stands in small print at the bottom. It opens
    no window and uses no global state of pyplot.
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
_UNITS = {"loss": " (mean over the examples)", "accuracy": " (share of the examples)",
          "noise_scale": " (examples in a batch)"}


def draw_curves(
    path: Path, columns: Mapping[str, Sequence[float]], title: str, monitor: Monitor = Monitor()
) -> None:
    """Draws one chart for the loss and one for each metric; writes no file without epochs.

    columns: the values of all epochs, by the name of their column in results.csv.
    Values that are not finite leave gaps; the monitor's best epoch is marked.
    """
    if not columns:
        return
    best = monitor.best_index(columns[monitor.column])
    validation = {f"val_{name}" for name in columns}
    names = [name for name in columns if name not in validation]
    width = min(len(names), 3)  # charts in a row
    height = -(-len(names) // width)
    with figure_file(path, 4.8 * max(2, width), 4.2 * height, title) as figure:
        charts = figure.subplots(height, width, squeeze=False).ravel()
        for axes in charts[len(names):]:
            axes.remove()
        for axes, name in zip(charts, names, strict=False):
            _draw(axes, columns, name, best)
            words = name.replace("_", " ")
            style_axes(axes, words.capitalize(), "epoch", words + _UNITS.get(name, ""))


def _draw(
    axes: "Axes", columns: Mapping[str, Sequence[float]], name: str, best: int | None
) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = range(1, len(columns[name]) + 1)
    curves = {"training": name, "validation": f"val_{name}"}
    shown = {label: column for label, column in curves.items() if column in columns}
    finite, marker = [], "o" if len(epochs) <= 30 else ""
    for color, (label, column) in zip(COLORS, shown.items(), strict=False):
        finite += [value for value in columns[column] if math.isfinite(value)]
        values = [value if math.isfinite(value) else math.nan for value in columns[column]]
        axes.plot(epochs, values, color=color, label=label, marker=marker, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    margin = max(0.5, 0.03 * (epochs[-1] - epochs[0]))
    axes.set_xlim(epochs[0] - margin, epochs[-1] + margin)
    if best is not None:
        axes.axvline(epochs[best], color="#999999", linestyle=":", zorder=1)
        value = columns[column][best]  # the validation's value, if there is one
        if math.isfinite(value):
            axes.plot(
                [epochs[best]], [value], "o", markersize=10, fillstyle="none", color=color,
                markeredgewidth=2, label=f"best, epoch {epochs[best]}: {value:.4g}",
            )
    if name == "loss" and finite and 0 < min(finite) < max(finite) / 50:
        axes.set_yscale("log")
    axes.legend(facecolor="white", edgecolor="none")  # hides the line of the best epoch
