"""The chart of gpu.csv: for each size of a workload, towers against their peers, and switches.

    python benchmarks/gpu_chart.py DIR

`gpu.py` calls it. A bar begins at 1.0 and goes right where towers, or the switch, are
faster; the axes are logarithmic, so that twice as fast and half as fast are as long.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_table  # noqa: E402  (found through the line above)
from benchmarks.gpu_plan import TRIP, Case, Setup, name_setup  # noqa: E402
from benchmarks.gpu_table import FAILED, MEASURED, NOT_REACHED, Table  # noqa: E402

PEERS = {
    "fit": "Keras fit, one device, same global batch",
    "fit_no_jit": "... without XLA",
    "mirrored": "MirroredStrategy, as many devices",
    "mirrored_one": "... summing on one device",
    "limit": "the limit: no averaging, no update",
}
SWITCHES = {
    "compiled": "towers compiled by XLA",
    "on_gpu": "parameters on the first GPU",
    "unplaced": "no prefetching to GPUs",
}
_BAR, _BLOCK, _GAP = 0.17, 0.62, 0.16  # inches: a bar; a block, for its label; between blocks
_MARGIN, _WIDTH = 2.8, 12.0  # inches, for title, axes, legends and note
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50)
_NARROWEST = 0.6, 1.6  # what the axes show at least


class Block(NamedTuple):
    """One size of a workload.

    label: its name and the absolute figures, on lines.
    peers: {peer: towers' speed / its}. switches: {switch: its speed / towers'}.
    """

    label: str
    peers: Mapping[str, float]
    switches: Mapping[str, float]


def draw(source: Path, target: Path) -> None:
    """Draws what a CSV of `gpu_table.write` holds; a PNG."""
    from towers.app.reporting.charts import figure_file, style_axes

    table = gpu_table.read(source)
    blocks = make_blocks(table)
    if not blocks:
        return
    heights = [block_height(block) for block in blocks]
    ends = list(itertools.accumulate(heights))
    middles = [end - height / 2 for end, height in zip(ends, heights, strict=True)]
    with figure_file(target, _WIDTH, _MARGIN + ends[-1], title(table), note(table)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        style_axes(left, "speed: towers / peer", "right of 1 towers are faster", "")
        style_axes(right, "speed: switch / towers", "right of 1 the switch makes them faster", "")
        draw_bars(left, middles, [block.peers for block in blocks], PEERS)
        draw_bars(right, middles, [block.switches for block in blocks], SWITCHES)
        for axes in (left, right):
            axes.hlines(ends[:-1], *axes.get_xlim(), color="#dddddd", linewidth=0.8)
        left.set_yticks(middles, [block.label for block in blocks], fontsize=8)
        left.set_ylim(ends[-1], 0)


def make_blocks(table: Table) -> list[Block]:
    """The sizes whose towers were measured, in the order of the table, a workload's together."""
    setups = [
        case.setup for case, row in table.items()
        if case.contender == "towers" and row["status"] == MEASURED
    ]
    workloads = list(dict.fromkeys(setup.workload for setup in setups))
    setups.sort(key=lambda setup: (workloads.index(setup.workload), setup.precision, setup[2:]))
    return [make_block(table, setup) for setup in setups]


def make_block(table: Table, setup: Setup) -> Block:
    """One size's ratios and label."""
    speeds = speeds_of(table, setup)
    own = speeds["towers"]
    peers = {name: own / speeds[name] for name in PEERS if name in speeds}
    switches = {name: speeds[name] / own for name in SWITCHES if name in speeds}
    each = 1e3 * setup.batch_size / own
    lines = [name_setup(setup), f"{milliseconds(each)}, {own:,.0f} examples/s"]
    trip = table.get(Case(*setup, TRIP), {})
    if trip.get("share_of_step"):
        both = float(trip["down_ms"]) + float(trip["up_ms"])
        share = float(trip["share_of_step"])
        lines.append(f"the trip over the CPU: {milliseconds(both)}, {share:.0%}")
    return Block("\n".join(lines), peers, switches)


def milliseconds(value: float) -> str:
    """"1.83 ms", "1,190 ms"."""
    return f"{value:.3g} ms" if value < 999 else f"{value:,.0f} ms"


def speeds_of(table: Table, setup: Setup) -> dict[str, float]:
    """{contender: examples per second} at a size; fit's on one GPU at the same global batch."""
    on_one = setup._replace(num_devices=1)
    found = {}
    for name in ("towers", *PEERS, *SWITCHES):
        place = on_one if name == "fit" else setup
        row = table.get(Case(*place, name), {})
        if row.get("status") == MEASURED:
            found[name] = float(row["examples_per_second"])
    return found


def block_height(block: Block) -> float:
    """A block's height in inches, with the gap below it."""
    return max(_BLOCK, _BAR * max(len(block.peers), len(block.switches))) + _GAP


def draw_bars(
    axes: Any, middles: Sequence[float], blocks: Sequence[Mapping[str, float]],
    labels: Mapping[str, str],
) -> None:
    """Draws a bar from 1 to each value, grouped by block, and a legend."""
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    from towers.app.reporting.charts import COLORS

    colors = dict(zip(labels, COLORS, strict=False))
    for middle, block in zip(middles, blocks, strict=True):
        for index, (name, value) in enumerate(block.items()):
            y = middle + (index - (len(block) - 1) / 2) * _BAR
            axes.barh(y, value - 1, _BAR * 0.85, left=1, color=colors[name])
            # Outside of the bar, whichever way it goes.
            side, offset = ("left", 4) if value >= 1 else ("right", -4)
            axes.annotate(f"{value:.2f}", (value, y), (offset, 0), textcoords="offset points",
                          ha=side, va="center", fontsize=7.5)
    values = [value for block in blocks for value in block.values()]
    low, high = min([_NARROWEST[0], *values]) / 1.3, max([_NARROWEST[1], *values]) * 1.3
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.grid(visible=False, axis="y")
    shown = [name for name in labels if any(name in block for block in blocks)]
    patches = [Patch(color=colors[name], label=labels[name]) for name in shown]
    below = axes.transAxes + ScaledTranslation(0, -0.5, axes.figure.dpi_scale_trans)  # inches
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, 0), bbox_transform=below,
                fontsize=8, frameon=False)


def title(table: Table) -> str:
    """Says plainly where no GPU was."""
    if any("CPU" in row["devices"] for row in table.values()):
        return "A rehearsal on CPU devices with small models: these are no GPU's figures"
    return "Towers on GPUs"


def note(table: Table) -> str:
    """The machine, and the measured part of the plan."""
    rows = list(table.values())
    last = rows[-1]
    places = dict.fromkeys(row["devices"].partition(",")[0] for row in rows)
    driver = f"; driver {last['driver']}" if last["driver"] else ""
    statuses = [row["status"] for row in rows]
    counts = [f"{statuses.count(status)} {status}" for status in (MEASURED, FAILED, NOT_REACHED)]
    versions = f"TensorFlow {last['tensorflow']}, Keras {last['keras']}"
    processor = f"{last['cores']} cores, {last['processor']}"
    return f"{'; '.join(places)}{driver}\n{processor}; {versions}; cases: {', '.join(counts)}"


if __name__ == "__main__":
    draw(Path(sys.argv[1]) / "gpu.csv", Path(sys.argv[1]) / "gpu.png")
