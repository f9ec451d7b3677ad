"""The chart of throughput.csv: towers' examples per second over each peer's, at 1.0 a line.

    python benchmarks/chart.py benchmarks/results/throughput.csv docs/images/throughput.png

`throughput.py` calls it after each run.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rounds import groups  # noqa: E402  (found through the line above)

Comparison: TypeAlias = "list[Mapping[str, Any]]"  # the CSV's rows, one a round

LABELS = {  # peer: its name and its marker; the colors of chart_style, in this order
    "fit": ("Keras fit, 1 device", "o"),
    "mirrored": ("MirroredStrategy", "s"),
    "towers": ("towers' own loop", "^"),
    "central": ("CentralStorageStrategy", "D"),
    "limit": ("the limit: no averaging, no update", "|"),
}
_ROW = 0.36  # inches for each workload
_MARGIN = 1.6  # inches for title, axis and note
_WIDTH = 8.0


def draw(source: Path, target: Path) -> None:
    """Draws the median ratios of a CSV; the last run of each comparison counts.

    Args:
        source: the CSV that `rounds.append_csv` wrote.
        target: the PNG.
    """
    # Imports TensorFlow: after the contenders.
    from towers.app.reporting.charts import figure_file, style_axes

    with source.open(newline="") as file:
        comparisons = groups(csv.DictReader(file))
    rows = split_by_workload(comparisons)
    height = _MARGIN + _ROW * len(rows)
    title, note = "Examples per second of towers, divided by each peer's", _about(comparisons)
    with figure_file(target, _WIDTH, height, title, note) as figure:
        axes = figure.add_subplot()
        style_axes(axes, "same global batch; right of 1.0, towers is faster", "", "")
        dots(axes, rows)


def dots(axes: Any, rows: Mapping[str, Sequence[Comparison]]) -> None:
    """Draws one line for each workload, with a dot at the median ratio to each peer."""
    from towers.app.reporting.charts import COLORS

    points: dict[str, list[tuple[float, int]]] = {}
    for y, comparisons in enumerate(rows.values()):
        for comparison in comparisons:
            first = comparison[0]
            points.setdefault(first["peer"], []).append((float(first["median_ratio"]), y))
    axes.axvline(1.0, color="black", linewidth=1)
    for color, (peer, (label, marker)) in zip(COLORS, LABELS.items(), strict=False):
        if peer in points:
            axes.scatter(*zip(*points[peer], strict=True), s=60, color=color, marker=marker,
                         label=label, zorder=3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.05)
    axes.legend(loc="best", fontsize=8)


def split_by_workload(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """The comparisons of each workload and device count."""
    rows: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        rows.setdefault(_title(comparison[0]), []).append(comparison)
    return rows


def _title(row: Mapping[str, Any]) -> str:
    call = " by fit" if row["contender"] == "parallel" else ""
    return f"{row['workload']}{call}, {row['num_devices']} devices"


def _about(comparisons: Sequence[Comparison]) -> str:
    """The hardware that the figures were measured on."""
    last = comparisons[-1][-1]
    rows = [rows[-1] for rows in comparisons]
    machines = dict.fromkeys(f"{row['cores']} cores, {row['processor']}" for row in rows)
    where = " or ".join(machines)
    if last["device"] != "CPU":
        where = f"{last['device']}, {where}"
    sizes = sorted({len(comparison) for comparison in comparisons})
    rounds = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    versions = f"TensorFlow {last['tensorflow']}, Keras {last['keras']}"
    return f"{where}; {versions}; medians of {rounds} rounds"


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
