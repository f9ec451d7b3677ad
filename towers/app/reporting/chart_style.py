"""The style of the pictures of a run and of a sweep.

matplotlib takes half a second to import: here and in the charts it is imported when one is drawn.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from towers.resume.run_dir import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, "Color Universal Design" (2008): told apart with every kind of colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_INK, _GRID = "#333333", "#dddddd"


@contextmanager
def drawn(
    path: Path, width: float, height: float, title: str, note: str = ""
) -> Iterator["Figure"]:
    """A figure to draw on; then a PNG, written so that `path` never holds a part of it.

    Uses no window and none of pyplot's global state.

    Args: width, height: in inches, of 120 pixels. note: smaller lines at the bottom.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=13, color=_INK)
    if note:
        figure.supxlabel(note, x=0.01, ha="left", size=9.5, color="#666666")
    yield figure
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


def style_axes(axes: "Axes", title: str, x_label: str, y_label: str) -> None:
    """Labels and a quiet frame."""
    axes.set_title(title, loc="left", size=11, color=_INK)
    axes.set_xlabel(x_label, color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_INK)
