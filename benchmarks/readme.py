"""Writes the measured figures of README and docs/measured.md from benchmarks/results.

    python benchmarks/readme.py

They stand between marks for them. A benchmark that was run again counts with its last rounds: run
this after it.
"""

import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rounds import groups  # noqa: E402  (found through the line above)

PAGES = {  # with the figures that each has a place for
    ROOT / "README.md": ("summary",),
    ROOT / "docs" / "measured.md": ("throughput", "others", "dcgan"),
}
RESULTS = ROOT / "benchmarks" / "results"

# The table's text for each workload, its number of devices, and the contender.
_ROWS = [
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
_PARALLEL_ROWS = [("`cnn`, batch 128", "cnn", 4), ("DCGAN, batch 128", "dcgan", 2)]
_PEERS = {
    "fit": "Keras `fit`, 1 device", "mirrored": "MirroredStrategy",
    "central": "CentralStorageStrategy", "limit": "the limit",
}
_CANNOT = {("cnn", "central"), ("notebook_cnn", "central")}  # a peer that fails is left out


class Results:
    """The comparisons of all files of results, each as its rounds' medians."""

    def __init__(self, folder: Path = RESULTS) -> None:
        """Args: folder: holds throughput.csv, first_step.csv and checkpointing.csv."""
        self._found: dict[tuple[str, ...], list[Any]] = {}
        for name in ("throughput", "first_step", "checkpointing"):
            with (folder / f"{name}.csv").open(newline="") as file:
                for rows in groups(csv.DictReader(file)):
                    key = (rows[0][k] for k in ("workload", "num_devices", "contender", "peer"))
                    self._found[name, *key] = rows

    def rounds(self, *key: Any) -> list[Any] | None:
        """The rows of (file, workload, devices, contender, peer); None where nobody measured it."""
        return self._found.get(tuple(map(str, key)))

    def median(self, column: str, *key: Any) -> float:
        """The median over the rounds of a column, or the "median_ratio" of all of them."""
        return statistics.median(float(row[column]) for row in self._found[tuple(map(str, key))])


def throughput(results: Results) -> str:
    """The table of examples per second and of the ratios to the peers."""
    lines = [
        "| workload, global batch, optimizer | devices | examples/s | "
        + " | ".join(_PEERS.values()) + " |",
        "| --- " * (3 + len(_PEERS)) + "|",
    ]
    for title, *key in _ROWS:
        measured = [p for p in _PEERS if results.rounds("throughput", *key, p)]
        speed = results.median("value", "throughput", *key, measured[0])
        ratios = [
            f"{results.median('median_ratio', 'throughput', *key, peer):.2f}" if peer in measured
            else "cannot train it" if (key[0], peer) in _CANNOT else ""
            for peer in _PEERS
        ]
        lines.append(f"| {title} | {key[1]} | {speed:,.0f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def summary(results: Results) -> str:
    """The small table of `make_parallel(...).fit`: its speed, as a ratio to two peers."""
    measured = [
        row for _, workload, devices in _PARALLEL_ROWS
        for row in results.rounds("throughput", workload, devices, "parallel", "fit") or []
    ]
    machines = " or ".join(
        sorted({f"{row['cores']} cores of {row['processor']}" for row in measured})
    )
    lines = [
        f"| Examples/s of `fit`; devices share {machines} | Keras, 1 device | MirroredStrategy |",
        "| --- | --- | --- |",
    ]
    for title, workload, devices in _PARALLEL_ROWS:
        ratios = [
            f"{results.median('median_ratio', *key):.2f} times" if results.rounds(*key) else ""
            for key in (
                ("throughput", workload, devices, "parallel", peer) for peer in ("fit", "mirrored")
            )
        ]
        lines.append(f"| {title}, {devices} devices | {ratios[0]} | {ratios[1]} |")
    return "\n".join(lines)


def dcgan(results: Results) -> str:
    """The table of a custom `train_step`."""
    fit, mirrored = (("throughput", "dcgan", 2, "parallel", peer) for peer in ("fit", "mirrored"))
    first, their_first = (
        ("first_step", "dcgan", 8, "parallel", peer) for peer in ("fit", "mirrored")
    )
    rows: list[tuple[Any, ...]] = [
        ("examples/s, 2 devices", "{:,.0f}", "", *(results.median(*one) for one in (
            ("peer_value", *fit), ("peer_value", *mirrored), ("value", *fit)))),
        ("first step, 8 devices", "{:.1f} s", " (1 device)", *(results.median(*one) for one in (
            ("peer_value", *first), ("peer_value", *their_first), ("value", *first)))),
        ("peak memory, 8 devices", "{:,.0f} MB", " (1 device)", *(results.median(*one) for one in (
            ("peer_peak_memory_mb", *first), ("peer_peak_memory_mb", *their_first),
            ("peak_memory_mb", *first)))),
    ]
    lines = [
        "| custom `train_step`, DCGAN | Keras `fit`, 1 device | MirroredStrategy | towers |",
        "| --- | --- | --- | --- |",
    ]
    for what, form, alone, *values in rows:
        theirs, others, ours = map(form.format, values)
        lines.append(f"| {what} | {theirs}{alone} | {others} | {ours} |")
    return "\n".join(lines)


def others(results: Results) -> str:
    """The list below the table."""
    first = "first_step", "resnet50", 8, "towers", "mirrored"
    parallel = "throughput", "cnn", 4, "parallel"
    saved = "checkpointing", "cnn", 2, "every 100", "none"
    return "\n".join([
        "- **The first step** of ResNet50 (32x32) on 8 devices, from the built model on: "
        f"{results.median('value', *first):.0f} s, against",
        f"  {results.median('peer_value', *first):.0f} s with MirroredStrategy.",
        "- **`make_parallel(...).fit`** trains `cnn` at "
        f"{results.median('median_ratio', *parallel, 'towers'):.2f} of the speed of towers' own "
        "loop,",
        f"  and at {results.median('median_ratio', *parallel, 'fit'):.2f} of the speed of `fit`.",
        "- **A checkpoint every 100 steps** of `cnn` costs "
        f"{100 * (1 - results.median('median_ratio', *saved)):.1f}% of its speed.",
    ])


FIGURES: dict[str, Callable[[Results], str]] = {
    "summary": summary, "throughput": throughput, "dcgan": dcgan, "others": others,
}


def written(page: Path, text: str, results: Results) -> str:
    """The text of a page with the figures of these results between its marks."""
    for name in PAGES[page]:
        begin, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
        if text.count(begin) != 1:
            count = text.count(begin)
            raise ValueError(f"{page.name} has {count} places for the figures of {name!r}, not 1.")
        before, rest = text.split(begin)
        text = before + begin + FIGURES[name](results) + "\n" + rest[rest.index(end):]
    return text


def main() -> None:
    """Rewrites the pages."""
    results = Results()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(written(page, text, results), encoding="utf-8")


if __name__ == "__main__":
    main()
