"""results.png: the loss and each metric of a run, training and validation, against epochs."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from towers.resume.best import Monitor
from towers.resume.run_dir import Result
from towers.app.named import one_line
from towers.app.reporting.chart_style import COLORS, drawn, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = "results.png"
_FEW = 30  # epochs up to which each gets a dot
_WIDE = 50.0  # ratio of largest to smallest loss from which the axis is logarithmic
_IN_A_ROW = 3  # charts


def draw_curves(
    path: Path, results: Sequence[Result], title: str, monitor: Monitor = Monitor()
) -> None:
    """Draws a run's epochs, a chart for the loss and for each metric; without any, no picture.

    Values that are not finite leave gaps.

    Args:
        path: of the PNG.
        results: the rows of results.csv.
        title: of the run, such as "cnn on mnist".
        monitor: whose best epoch is marked.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    if not results:
        return
    best = best_epoch(results, monitor)
    values = results[0].values
    twins = {f"val_{name}" for name in values}
    names = [name for name in values if name not in twins]
    width = min(len(names), _IN_A_ROW)
    height = -(-len(names) // width)
    with drawn(path, 4.8 * max(2, width), 4.2 * height, title) as figure:
        charts = figure.subplots(height, width, squeeze=False).ravel()
        for axes in charts[len(names):]:
            axes.remove()
        for axes, name in zip(charts, names, strict=False):
            _draw(axes, results, name, best)
            style_axes(axes, name.capitalize(), "epoch", _label(name))
        _scale(charts[0], results)


def draw_or_warn(
    directory: Path,
    rows: Sequence[Sequence[float]],
    columns: Sequence[str],
    title: str,
    monitor: Monitor,
    warn: Callable[[str], None],
) -> None:
    """results.png in a run's directory; where it cannot be drawn, a warning: the run goes on.

    Args:
        directory: of the run.
        rows: of results.csv.
        columns: the names of their values.
        title, monitor: see `draw_curves`.
        warn: called with one line.
    """
    try:
        results = [Result.of(row, columns) for row in rows]
        draw_curves(directory / CURVES, results, title, monitor)
    except Exception as error:  # whatever matplotlib raises
        warn(f"{CURVES} cannot be drawn ({one_line(error)}); nothing else is missing.")


def best_epoch(results: Sequence[Result], monitor: Monitor) -> Result | None:
    """The first row with the best finite value of the column; None where no value is finite."""
    index = monitor.best_index([result.values[monitor.column] for result in results])
    return None if index is None else results[index]


def _draw(axes: "Axes", results: Sequence[Result], name: str, best: Result | None) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = [result.epoch for result in results]
    marker = "o" if len(results) <= _FEW else ""
    shown = {
        column: (label, color)
        for column, label, color in (
            (name, "training", COLORS[0]),
            (f"val_{name}", "validation", COLORS[1]),
        )
        if column in results[0].values
    }
    for column, (label, color) in shown.items():
        values = [result.values[column] for result in results]
        gaps = [value if math.isfinite(value) else math.nan for value in values]
        axes.plot(epochs, gaps, color=color, label=label, marker=marker, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    margin = max(0.5, 0.03 * (epochs[-1] - epochs[0]))
    axes.set_xlim(epochs[0] - margin, epochs[-1] + margin)
    if best is not None:
        axes.axvline(best.epoch, color="#999999", linestyle=":", zorder=1)
        value = best.values[column]  # of validation, if there is any
        if math.isfinite(value):
            axes.plot(
                [best.epoch], [value], "o", markersize=10, fillstyle="none", color=color,
                markeredgewidth=2, label=f"best, epoch {best.epoch}: {value:.4g}",
            )
    axes.legend(frameon=False)


def _label(name: str) -> str:
    share = {"loss": " (mean over the examples)", "accuracy": " (share of the examples)"}
    return f"{name}{share.get(name, '')}"


def _scale(loss: "Axes", results: Sequence[Result]) -> None:
    """A logarithmic axis for losses far apart."""
    columns = [name for name in ("loss", "val_loss") if name in results[0].values]
    values = [result.values[name] for result in results for name in columns]
    values = [value for value in values if math.isfinite(value)]
    if values and min(values) > 0 and max(values) > _WIDE * min(values):
        loss.set_yscale("log")
