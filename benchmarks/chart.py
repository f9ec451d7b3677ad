"""Draws the rows of throughput.py in results.csv: the speed of towers, divided by each peer's.

python benchmarks/chart.py
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rounds import RESULTS, ROOT, group_comparisons, read_csv

PEERS = {
    "fit": "Keras fit, 1 device",
    "mirrored": "MirroredStrategy",
    "limit": "the limit: no averaging, no update",
}
MARKERS = "os|"
ROW_HEIGHT, MARGIN, WIDTH = 0.36, 1.6, 8.0  # inches


def draw(source: Path, target: Path) -> None:
    """Draws the median ratios of a table of `rounds.append_csv` to a PNG."""
    # This imports TensorFlow, so it runs after the measurements.
    from towers.app.reporting.charts import figure_file

    rows = read_csv(source, "throughput")
    comparisons = group_comparisons(r for r in rows if r["measure"] == "examples_per_second")
    ratios: dict[str, dict[str, float]] = {}
    for first, *_ in comparisons:
        call = " by fit" if first["contender"] == "parallel" else ""
        title = f"{first['workload']}{call}, {first['num_devices']} devices"
        ratios.setdefault(title, {})[first["peer"]] = float(first["median_ratio"])
    height = MARGIN + ROW_HEIGHT * len(ratios)
    title = "Examples per second of towers, divided by each peer's"
    with figure_file(target, WIDTH, height, title, describe_rows(comparisons)) as figure:
        axes = figure.add_subplot()
        axes.set_title("same global batch; right of 1.0, towers is faster")
        axes.axvline(1.0, color="black", linewidth=1)
        for (peer, label), marker in zip(PEERS.items(), MARKERS, strict=True):
            points = [(row[peer], i) for i, row in enumerate(ratios.values()) if peer in row]
            if points:
                x, y = zip(*points, strict=True)
                axes.scatter(x, y, s=60, marker=marker, label=label, zorder=3)
        axes.set_yticks(range(len(ratios)), list(ratios))
        axes.set_ylim(len(ratios) - 0.5, -0.5)
        axes.margins(x=0.05)
        axes.legend(loc="best", fontsize=8)


def describe_rows(comparisons: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Returns the machines, the versions and the number of rounds."""
    last = comparisons[-1][-1]
    machines = dict.fromkeys(
        f"{rows[-1]['cores']} cores, {rows[-1]['processor']}" for rows in comparisons
    )
    where = " or ".join(machines)
    if last["device"] != "CPU":
        where = f"{last['device']}, {where}"
    sizes = sorted({len(rows) for rows in comparisons})
    rounds = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    versions = f"TensorFlow {last['tensorflow']}, Keras {last['keras']}"
    return f"{where}; {versions}; medians of {rounds} rounds"


if __name__ == "__main__":
    draw(RESULTS, ROOT / "docs" / "images" / "throughput.png")
