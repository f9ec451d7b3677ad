"""The chart of throughput.csv: towers' examples per second over each peer's, at 1.0 a line.

    python benchmarks/chart.py benchmarks/results/throughput.csv docs/images/throughput.png

`throughput.py` draws it by itself.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rounds import groups  # noqa: E402  (found through the line above)

Comparison: TypeAlias = "list[Mapping[str, Any]]"  # the CSV's rows, one a round

LABELS = {  # in the order of the bars; chart_style's colours, in this order
    "fit": "Keras fit, 1 device",
    "mirrored": "MirroredStrategy",
    "parallel": "make_parallel's fit",
    "central": "CentralStorageStrategy",
    "limit": "the limit: no averaging, no update",
}
_BAR, _GAP = 0.24, 0.3  # inches: of a bar; between workloads
_MARGIN = 2.0  # inches, for title, axis, legend and note
_WIDTH = 8.0


def draw(source: Path, target: Path) -> None:
    """Draws the median ratios of a CSV; the last run of each comparison counts.

    Args:
        source: what `rounds.append_csv` wrote.
        target: the PNG.
    """
    # Imports TensorFlow: after the contenders.
    from towers.app.reporting.chart_style import drawn, style_axes

    with source.open(newline="") as file:
        comparisons = groups(csv.DictReader(file))
    blocks = split_by_workload(comparisons)
    height = _MARGIN + sum(len(block) * _BAR + _GAP for block in blocks.values())
    title, note = "Examples per second, towers / peer", _about(comparisons)
    with drawn(target, _WIDTH, height, title, note) as figure:
        axes = figure.add_subplot()
        style_axes(axes, "at the same global batch; right of 1.0 towers are faster", "", "")
        bars(axes, blocks)
        figure.legend(loc="outside right upper", fontsize=8, frameon=False)


def bars(axes: Any, blocks: Mapping[str, Sequence[Comparison]]) -> None:
    """One bar for each comparison, as long as its median ratio; those of a block side by side."""
    from towers.app.reporting.chart_style import COLORS

    names, middles, shown, top = list(LABELS), [], set(), 0.0
    for block in blocks.values():
        for row, comparison in enumerate(block):
            peer, ratio = comparison[0]["peer"], float(comparison[0]["median_ratio"])
            color = COLORS[names.index(peer)] if peer in names else "#999999"
            label = "_" if peer in shown else LABELS.get(peer, peer)  # once in the legend
            bar = axes.barh(top + row * _BAR, ratio, _BAR * 0.9, color=color, label=label)
            on_white = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # over the line at 1
            axes.bar_label(bar, [f"{ratio:.2f}"], padding=4, fontsize=8, bbox=on_white)
            shown.add(peer)
        middles.append(top + (len(block) - 1) * _BAR / 2)
        top += len(block) * _BAR + _GAP
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(middles, list(blocks))
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlim(left=0)


def split_by_workload(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """The comparisons of each workload and device count, peers in the order of LABELS."""
    order = list(LABELS)
    blocks: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        blocks.setdefault(_title(comparison[0]), []).append(comparison)
    for block in blocks.values():
        block.sort(key=lambda rows: (*order, rows[0]["peer"]).index(rows[0]["peer"]))
    return blocks


def _title(row: Mapping[str, Any]) -> str:
    contender = "" if row["contender"] == "towers" else f"\n{row['contender']}"
    return f"{row['workload']}\n{row['num_devices']} devices{contender}"


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
