"""Draws results.png, a run's loss and metrics by epoch, and makes the figures of all charts.

matplotlib takes half a second to import, so it is imported only when a chart is drawn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from towers.resume.directories import write_atomically
from towers.app.monitor import Monitor
from towers.app.named import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CURVES = "results.png"


@contextmanager
def or_warning(name: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Turns an error of drawing into a warning, because a picture must not end a run."""
    try:
        yield
    except Exception as error:  # whatever matplotlib raises
        warn(f"{name} cannot be drawn ({one_line(error)}); nothing else is missing.")


@contextmanager
def figure_file(
    path: Path, width: float, height: float, title: str, note: str = ""
) -> Iterator["Figure"]:
    """Yields a figure to draw on, then writes it to `path` as a PNG in one atomic step.

    Its size is in inches of 120 pixels. The `note` stands in small print at the bottom. Lines get
    colors that are distinguishable with any colour vision. It opens no window.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["seaborn-v0_8-whitegrid", "tableau-colorblind10"]):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        figure.supxlabel(note, x=0.01, ha="left", size="small")
        yield figure
        write_atomically(path, lambda file: figure.savefig(file, format="png"))


def draw_curves(
    path: Path, columns: Mapping[str, Sequence[float]], title: str, monitor: Monitor = Monitor()
) -> None:
    """Draws one chart for the loss and one for each metric; writes no file without epochs.

    columns: the values of all epochs, by the name of their column in results.csv.
    Values that are not finite leave gaps. A line marks the monitor's best epoch.
    """
    if not columns:
        return
    from matplotlib.ticker import MaxNLocator

    best = monitor.best_index(columns)
    validation = {f"val_{name}" for name in columns}
    names = [name for name in columns if name not in validation]
    with figure_file(path, 4.8 * len(names), 4.2, title) as figure:
        (charts,) = figure.subplots(1, len(names), squeeze=False)
        for axes, name in zip(charts, names, strict=True):
            for label, column in ("training", name), ("validation", f"val_{name}"):
                if values := columns.get(column):
                    axes.plot(range(1, len(values) + 1), values, ".-", label=label)
                    marked = values  # the validation's values, if there are any
            if best is not None:
                label = f"best, epoch {best + 1}: {marked[best]:.4g}"
                axes.axvline(best + 1, color="gray", linestyle=":", label=label)
            lowest, highest = axes.dataLim.intervaly
            if name == "loss" and 0 < lowest < highest / 50:
                axes.set_yscale("log")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axes.set(title=name.replace("_", " ").capitalize(), xlabel="epoch")
            axes.legend()
