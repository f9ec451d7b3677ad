"""results.png: loss and accuracy of a run, training and validation, against epochs."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from towers.best import best_index
from towers.config import TrainConfig
from towers.listener import Listener
from towers.named import one_line
from towers.reporting.chart_style import COLORS, drawn, style_axes
from towers.saving.position import Position
from towers.saving.run_dir import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = "results.png"
_FEW = 30  # epochs up to which each gets a dot
_WIDE = 50.0  # ratio of largest to smallest loss from which the axis is logarithmic


class Curves(Listener):
    """Draws results.png when the run has ended, however it has ended."""

    def __init__(
        self,
        directory: Path,
        position: Position,
        config: TrainConfig,
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            directory: of the run.
            position: where the run stands.
            config: of the run.
            warn: called with one line.
        """
        self._directory, self._position, self._warn = directory, position, warn
        self._title = f"{config.model} on {config.dataset}"
        self._monitor = config.monitor

    def end(self) -> None:
        draw_or_warn(
            self._directory, self._position.results, self._title, self._monitor, self._warn
        )

    def stop(self) -> None:
        self.end()


def draw_curves(
    path: Path, results: Sequence[Result], title: str, monitor: str = "val_accuracy"
) -> None:
    """Draws a run's epochs; without any, there is no picture.

    Values that are not finite leave gaps.

    Args:
        path: of the PNG.
        results: the rows of results.csv.
        title: of the run, such as "cnn on mnist".
        monitor: the column whose best epoch is marked: the lowest loss, the highest accuracy.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    if not results:
        return
    best = best_epoch(results, monitor)
    with drawn(path, 9.6, 4.2, title) as figure:
        loss, accuracy = figure.subplots(1, 2)
        _draw(loss, results, "loss", best)
        _draw(accuracy, results, "accuracy", best)
        style_axes(loss, "Loss", "epoch", "loss (mean over the examples)")
        style_axes(accuracy, "Accuracy", "epoch", "accuracy (share of the examples)")
        values = _finite(results, "loss") + _finite(results, "val_loss")
        if values and min(values) > 0 and max(values) > _WIDE * min(values):
            loss.set_yscale("log")


def draw_or_warn(
    directory: Path,
    rows: Sequence[Sequence[float]],
    title: str,
    monitor: str,
    warn: Callable[[str], None],
) -> None:
    """results.png in a run's directory; where it cannot be drawn, a warning: the run goes on.

    Args:
        directory: of the run.
        rows: of results.csv, each a Result or the list of its values.
        title, monitor: see `draw_curves`.
        warn: called with one line.
    """
    try:
        results = [Result.of(row) for row in rows]
        draw_curves(directory / CURVES, results, title, monitor)
    except Exception as error:  # whatever matplotlib raises
        warn(f"{CURVES} cannot be drawn ({one_line(error)}); nothing else is missing.")


def best_epoch(results: Sequence[Result], monitor: str) -> Result | None:
    """The first row with the best finite value of the column; None where no value is finite."""
    index = best_index([getattr(result, monitor) for result in results], monitor)
    return None if index is None else results[index]


def _draw(axes: "Axes", results: Sequence[Result], name: str, best: Result | None) -> None:
    from matplotlib.ticker import MaxNLocator

    epochs = [result.epoch for result in results]
    marker = "o" if len(results) <= _FEW else ""
    for column, label, color in (
        (name, "training", COLORS[0]),
        (f"val_{name}", "validation", COLORS[1]),
    ):
        values = [getattr(result, column) for result in results]
        gaps = [value if math.isfinite(value) else math.nan for value in values]
        axes.plot(epochs, gaps, color=color, label=label, marker=marker, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    margin = max(0.5, 0.03 * (epochs[-1] - epochs[0]))
    axes.set_xlim(epochs[0] - margin, epochs[-1] + margin)
    if best is not None:
        axes.axvline(best.epoch, color="#999999", linestyle=":", zorder=1)
        value = getattr(best, f"val_{name}")
        if math.isfinite(value):
            axes.plot(
                [best.epoch], [value], "o", markersize=10, fillstyle="none", color=COLORS[1],
                markeredgewidth=2, label=f"best, epoch {best.epoch}: {value:.4g}",
            )
    axes.legend(frameon=False)


def _finite(results: Sequence[Result], column: str) -> list[float]:
    values = [getattr(result, column) for result in results]
    return [value for value in values if math.isfinite(value)]
