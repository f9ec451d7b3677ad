"""Writes the measured figures of README and docs/measured.md from benchmarks/results.

    python benchmarks/readme.py

Run it after each benchmark. It replaces the text between the marks of each table. If a benchmark
was repeated, the newest rounds count.
"""

import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rounds import group_comparisons  # noqa: E402  (found through the line above)

PAGES = {  # the tables that each page contains
    ROOT / "README.md": ("summary",),
    ROOT / "docs" / "measured.md": ("throughput", "others", "dcgan"),
}
RESULTS = ROOT / "benchmarks" / "results"

# The text of the first cell, the workload, the number of devices, and the contender.
_THROUGHPUT_ROWS = [
    ("`cnn`, 128, SGD momentum", "cnn", 4, "towers"),
    ("`notebook_cnn`, 128, RMSprop", "notebook_cnn", 4, "towers"),
    ("MLP of 41 million parameters, 512, Adam", "mlp41m", 2, "towers"),
    ("MLP of 41 million parameters, 512, Adam", "mlp41m", 8, "towers"),
    ("2 x 256 GRU, 256, Adam", "gru", 2, "towers"),
    ("2 x 128 GRU, 128, Adam", "gru_small", 2, "towers"),
    ("MLP 784-2048-2048-10, 256, Adam", "mlp", 2, "towers"),
    ("MLP 784-2048-2048-10, 256, Adam", "mlp", 8, "towers"),
    ("DCGAN by `make_parallel(...).fit`, 128, 2 x Adam", "dcgan", 2, "parallel"),
]
_SUMMARY_ROWS = [("`cnn`, batch 128", "cnn", 4), ("DCGAN, batch 128", "dcgan", 2)]
_PEERS = {
    "fit": "Keras `fit`, 1 device",
    "mirrored": "MirroredStrategy",
    "central": "CentralStorageStrategy",
    "limit": "the limit",
}
_FAILS = {("cnn", "central"), ("notebook_cnn", "central")}  # a peer that fails has no rows


class Results:
    """The comparisons in the CSV files; a key is (file, workload, devices, contender, peer)."""

    def __init__(self, folder: Path = RESULTS) -> None:
        """Args: folder: contains throughput.csv, first_step.csv and checkpointing.csv."""
        self._rows: dict[tuple[str, ...], list[Any]] = {}
        for name in ("throughput", "first_step", "checkpointing"):
            with (folder / f"{name}.csv").open(newline="") as file:
                for rows in group_comparisons(csv.DictReader(file)):
                    key = (rows[0][k] for k in ("workload", "num_devices", "contender", "peer"))
                    self._rows[name, *key] = rows

    def rows(self, *key: Any) -> list[Any]:
        """Returns the rows of a comparison, one per round; [] if it was not measured."""
        return self._rows.get(tuple(map(str, key)), [])

    def median(self, column: str, *key: Any) -> float:
        """Returns the median of a column over the rounds of a comparison."""
        return statistics.median(float(row[column]) for row in self.rows(*key))

    def ratio(self, *key: Any) -> str:
        """Returns the median ratio to a peer, such as "1.18"; "" if it was not measured."""
        return f"{self.median('median_ratio', *key):.2f}" if self.rows(*key) else ""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of text cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def throughput(results: Results) -> str:
    """Returns the table of examples per second and of the ratios to the peers."""
    rows = []
    for title, *key in _THROUGHPUT_ROWS:
        ratios = {peer: results.ratio("throughput", *key, peer) for peer in _PEERS}
        measured = next(peer for peer, ratio in ratios.items() if ratio)
        for peer in _PEERS:
            if (key[0], peer) in _FAILS:
                ratios[peer] = "cannot train it"
        speed = results.median("value", "throughput", *key, measured)
        rows.append([title, str(key[1]), f"{speed:,.0f}", *ratios.values()])
    header = ["workload, global batch, optimizer", "devices", "examples/s", *_PEERS.values()]
    return markdown_table(header, rows)


def summary(results: Results) -> str:
    """Returns README's table of `make_parallel(...).fit`: its speed, as a ratio to two peers."""
    rows, machines = [], set()
    for title, *key in _SUMMARY_ROWS:
        keys = [("throughput", *key, "parallel", peer) for peer in ("fit", "mirrored")]
        ratios = [f"{ratio} times" if (ratio := results.ratio(*one)) else "" for one in keys]
        rows.append([f"{title}, {key[1]} devices", *ratios])
        for row in results.rows(*keys[0]):
            machines.add(f"{row['cores']} cores of {row['processor']}")
    where = " or ".join(sorted(machines))
    return markdown_table(
        [f"Examples/s of `fit`; devices share {where}", "Keras, 1 device", "MirroredStrategy"], rows
    )


def dcgan(results: Results) -> str:
    """Returns the table of a custom `train_step`."""
    rows = []
    for title, file, devices, column, form, note in (
        ("examples/s, 2 devices", "throughput", 2, "value", "{:,.0f}", ""),
        ("first step, 8 devices", "first_step", 8, "value", "{:.1f} s", " (1 device)"),
        ("peak memory, 8 devices", "first_step", 8, "peak_memory_mb", "{:,.0f} MB", " (1 device)"),
    ):
        fit, mirrored = ((file, "dcgan", devices, "parallel", peer) for peer in ("fit", "mirrored"))
        values = (
            results.median(f"peer_{column}", *fit),
            results.median(f"peer_{column}", *mirrored),
            results.median(column, *fit),
        )
        by_fit, by_mirrored, ours = map(form.format, values)
        rows.append([title, by_fit + note, by_mirrored, ours])
    return markdown_table(
        ["custom `train_step`, DCGAN", "Keras `fit`, 1 device", "MirroredStrategy", "towers"], rows
    )


def others(results: Results) -> str:
    """Returns the list of first steps and checkpoints."""
    first = "first_step", "resnet50", 8, "towers", "mirrored"
    parallel = "throughput", "cnn", 4, "parallel"
    cost = 1 - results.median("median_ratio", "checkpointing", "cnn", 2, "every 100", "none")
    return "\n".join(
        [
            "- **The first step** of ResNet50 (32x32) on 8 devices, from the built model on: "
            f"{results.median('value', *first):.0f} s, against",
            f"  {results.median('peer_value', *first):.0f} s with MirroredStrategy.",
            "- **`make_parallel(...).fit`** trains `cnn` at "
            f"{results.ratio(*parallel, 'towers')} of the speed of towers' own loop,",
            f"  and at {results.ratio(*parallel, 'fit')} of the speed of `fit`.",
            f"- **A checkpoint every 100 steps** of `cnn` costs {100 * cost:.1f}% of its speed.",
        ]
    )


TABLES: dict[str, Callable[[Results], str]] = {
    "summary": summary,
    "throughput": throughput,
    "dcgan": dcgan,
    "others": others,
}


def fill_in(page: Path, text: str, results: Results) -> str:
    """Returns the text of a page with the figures of these results between its marks.

    Raises:
        ValueError: The page lacks the marks of a table or has them twice.
    """
    for name in PAGES[page]:
        begin, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
        count = text.count(begin)
        if count != 1:
            raise ValueError(f"{page.name} has {count} places for the figures of {name!r}, not 1.")
        before, rest = text.split(begin)
        text = before + begin + TABLES[name](results) + "\n" + rest[rest.index(end) :]
    return text


def main() -> None:
    """Rewrites the pages."""
    results = Results()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(fill_in(page, text, results), encoding="utf-8")


if __name__ == "__main__":
    main()
