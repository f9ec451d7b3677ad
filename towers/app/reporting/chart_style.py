"""Defines the style of the charts of a run and of a sweep.

matplotlib takes half a second to import, so it is imported only when a chart is drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from towers.resume.run_dir import write_atomically

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
