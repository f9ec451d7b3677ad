"""Writes the measured figures of README and docs/ from benchmarks/results.csv.

    python benchmarks/readme.py

It replaces the text between the marks of each table. `benchmarks/all.py` calls it after all
measurements.
"""

import csv
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import exactness_tables
from benchmarks.rounds import KEY, RESULTS, group_comparisons

PAGES = {  # the tables that each page contains
    ROOT / "README.md": ("summary",),
    ROOT / "docs" / "measured.md": (
        *("machine", "throughput", "epochs", "others", "first_epochs"),
        *("exactness", "outcomes", "cases", "dcgan", "data", "exchange", "recovery"),
    ),
    ROOT / "docs" / "memory.md": ("memory",),
    ROOT / "docs" / "placements.md": ("placements",),
}

# The text of the first cell, the workload, the number of devices, and the contender.
_THROUGHPUT_ROWS = [
    ("`cnn`, 128, SGD momentum", "cnn", 4, "towers"),
    ("`notebook_cnn`, 128, RMSprop", "notebook_cnn", 4, "towers"),
    ("MLP of 41 million parameters, 512, Adam", "mlp41m", 2, "towers"),
    ("2 x 256 GRU, 256, Adam", "gru", 2, "towers"),
    ("MLP 784-2048-2048-10, 256, Adam", "mlp", 2, "towers"),
    ("DCGAN by `make_parallel(...).fit`, 128, 2 x Adam", "dcgan", 2, "parallel"),
]
_PEERS = {
    "fit": "Keras `fit`, 1 device",
    "mirrored": "MirroredStrategy",
    "limit": "the limit",
}
_EPOCHS_ROWS = {
    "cnn": "`cnn`, 128",
    "gru_small": "2 x 128 GRU, 128",
    "text": "masked bidirectional LSTM of 64 units, 64",
    "transformer": "Transformer, two decoder blocks, 32",
}
# Keras Applications whose first epochs are measured.
MODELS = "MobileNetV2 ResNet50 EfficientNetB0"
_EXACTNESS_WAYS = ("Keras, 1 device", "MirroredStrategy", "towers")
_SUMMARY_ROWS = (
    "an uneven last batch: 32, 32, 32, 5",
    "BatchNormalization",
    "a masked loss: sequences of 1 to 5 steps",
    "a contrastive loss",
)
FAULTS = {
    "kill": "killed (SIGKILL)",
    "stop": "stopped (SIGSTOP)",
    "hang": "hung between two steps",
}
_EXCHANGED, _WORKERS = ("0.1 MB", "4.8 MB", "32 MB"), (2, 4, 8)
_PLACEMENTS = {
    "copies on 8 devices": ("copies", "mirrored", "MirroredStrategy"),
    "2 stages, 4 groups": ("stages_2", "towers", "the same towers without stages"),
    "4 stages, 2 groups": ("stages_4", "towers", "the same towers without stages"),
}


class Results:
    """The comparisons in the table of results, found by the columns in `rounds.KEY`."""

    def __init__(self, path: Path = RESULTS) -> None:
        """Args: path: a table that `rounds.append_csv` wrote."""
        with path.open(newline="") as file:
            self.all = list(csv.DictReader(file))
        self._groups = {
            tuple(rows[0][name] for name in KEY): rows for rows in group_comparisons(self.all)
        }

    def of(self, benchmark: str) -> list[dict[str, str]]:
        """Returns all rows of a benchmark.

        Raises:
            LookupError: It was not run.
        """
        found = [row for row in self.all if row["benchmark"] == benchmark]
        if not found:
            raise LookupError(f"{benchmark} has no rows")
        return found

    def rows(self, benchmark: str, **key: Any) -> list[Any]:
        """Returns the rows of a comparison, one per round; [] if it was not measured."""
        key = {"measure": "examples_per_second", "benchmark": benchmark, **key}
        return self._groups.get(tuple(str(key.get(name, "")) for name in KEY), [])

    def median(self, column: str, benchmark: str, **key: Any) -> float:
        """Returns the median of a column over the rounds of a comparison.

        Raises:
            LookupError: It was not measured.
        """
        rows = self.rows(benchmark, **key)
        if not rows:
            raise LookupError(f"{benchmark} has no row of {key}")
        return statistics.median(float(row[column]) for row in rows)

    def spread(self, column: str, form: str, benchmark: str, **key: Any) -> str:
        """Returns "MEDIAN (LOWEST to HIGHEST)" of a column over the rounds."""
        median = self.median(column, benchmark, **key)
        values = sorted(float(row[column]) for row in self.rows(benchmark, **key))
        return f"{median:{form}} ({values[0]:{form}} to {values[-1]:{form}})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of text cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def measured_machine(results: Results) -> str:
    """Returns what was measured where."""
    machines = dict.fromkeys(f"{row['cores']} cores of {row['processor']}" for row in results.all)
    last = results.all[-1]
    versions = f"TensorFlow {last['tensorflow']}, Keras {last['keras']}, Python {last['python']}"
    exact = ("exactness", exactness_tables.BENCHMARK)
    commits = {row["commit"] for row in results.all if row["benchmark"] not in exact}
    code = f"commit {' and '.join(sorted(filter(None, commits)))}"
    if "" in commits:
        older = {row["benchmark"] for row in results.all if not row["commit"]}
        code += f" ({', '.join(sorted(older))}: earlier versions)"
    return f"All figures were measured with {code} on {' or '.join(machines)}: {versions}."


def throughput(results: Results) -> str:
    """Returns the table of examples per second and of the ratios to the peers."""
    rows = []
    for title, workload, devices, contender in _THROUGHPUT_ROWS:
        ratios, speeds = [], []
        for peer in _PEERS:
            key = {"workload": workload, "num_devices": devices}
            found = results.rows("throughput", **key, contender=contender, peer=peer)
            speeds += [float(row["value"]) for row in found]
            ratios.append(f"{float(found[0]['median_ratio']):.2f}" if found else "")
        if not speeds:
            raise LookupError(f"throughput has no row of {title} on {devices} devices")
        rows.append([title, str(devices), f"{statistics.median(speeds):,.0f}", *ratios])
    header = ["workload, global batch, optimizer", "devices", "examples/s", *_PEERS.values()]
    return markdown_table(header, rows)


def epochs(results: Results) -> str:
    """Returns the table of whole epochs of `fit`."""
    rows = []
    for workload, title in _EPOCHS_ROWS.items():
        key = {"workload": workload, "num_devices": 2, "contender": "parallel", "peer": "fit"}
        fit, ours = (
            f"{results.median(column, 'epochs', **key):,.0f}" for column in ("peer_value", "value")
        )
        rows.append([title, fit, ours, results.spread("ratio", ".2f", "epochs", **key)])
    header = ["model, global batch", "Keras `fit`, examples/s", "towers, examples/s", "ratio"]
    return markdown_table(header, rows)


def others(results: Results) -> str:
    """Returns the list of first steps, checkpoints and memory."""
    first = {"workload": "resnet50", "num_devices": 8, "contender": "towers", "peer": "mirrored"}
    first |= {"measure": "first_step_seconds"}
    wide = {"workload": "mlp41m", "num_devices": 2, "contender": "towers", "peer": "mirrored"}
    ours, other = (
        results.median(column, "throughput", **wide) / 1e3
        for column in ("peak_memory_mb", "peer_peak_memory_mb")
    )
    key = {"workload": "cnn", "num_devices": 2, "contender": "every 100", "peer": "none"}
    cost = 1 - results.median("median_ratio", "checkpointing", **key)
    return "\n".join(
        [
            "- **The first step** of ResNet50 (32x32) on 8 devices by the rules for GPUs, XLA included: "
            f"{results.median('value', 'placements', **first):.0f} s, against",
            f"  {results.median('peer_value', 'placements', **first):.0f} s with MirroredStrategy.",
            f"- **A checkpoint every 100 steps** of `cnn` costs {100 * cost:.1f}% of its speed.",
            "- **Peak memory** of the MLP of 41 million parameters on 2 devices: "
            f"{ours:.1f} GB, against {other:.1f} GB with",
            "  MirroredStrategy.",
        ]
    )


def first_epochs(results: Results) -> str:
    """Returns the table of the first two epochs of Keras Applications."""
    rows = []
    for model in MODELS.split():
        key = {"workload": model, "num_devices": 3, "contender": "synchronized", "peer": "fit"}
        cells = [
            f"{results.median(column, 'first_epochs', **key, measure='seconds'):{form}}"
            for column, form in (("peer_value", ".1f"), ("value", ".1f"), ("ratio", ".2f"))
        ]
        rows.append([model, *cells])
    return markdown_table(["model", "Keras `fit`, s", "towers, s", "ratio"], rows)


def _differences(results: Results, case: str, ways: Sequence[str]) -> list[str]:
    cells = []
    for way in ways:
        key = {"workload": case, "num_devices": 4, "contender": way, "measure": "difference"}
        if not (rows := results.rows("exactness", **key)):
            raise LookupError(f"exactness has no row of {case}")
        value = rows[0]["value"]
        if value != "raises":
            value = f"{float(value):.2g}" if float(value) > 1e-9 else f"{float(value):.0e}"
        cells.append({"0e+00": "0"}.get(value, value))
    return cells


def exactness(results: Results) -> str:
    """Returns the table of differences from the weights of one device."""
    cases = [row["workload"] for row in results.of("exactness")]
    rows = [[case, *_differences(results, case, _EXACTNESS_WAYS)] for case in dict.fromkeys(cases)]
    return markdown_table(["largest difference of a weight", *_EXACTNESS_WAYS], rows)


def summary(results: Results) -> str:
    """Returns README's rows of the same table."""
    rows = [[case, *_differences(results, case, _EXACTNESS_WAYS[1:])] for case in _SUMMARY_ROWS]
    return markdown_table(["largest difference of a weight", *_EXACTNESS_WAYS[1:]], rows)


def outcomes(results: Results) -> str:
    """Returns the number of cases with each outcome."""
    rows = exactness_tables.count_outcomes(results.of(exactness_tables.BENCHMARK))
    return markdown_table(["way to train on 2 devices", *exactness_tables.OUTCOMES], rows)


def cases(results: Results) -> str:
    """Returns a table of the cases in which some way is not exact, and the names of the others."""
    rows = exactness_tables.list_cases(results.of(exactness_tables.BENCHMARK))
    differ, exact = exactness_tables.split_cases(rows)
    listed = f"Every way is exact in the other {len(exact)} cases: `{'`, `'.join(exact)}`."
    table = markdown_table(["case", *exactness_tables.TITLES.values()], differ)
    return f"{table}\n\n{textwrap.fill(listed, 140, break_on_hyphens=False)}"


def dcgan(results: Results) -> str:
    """Returns the table of a custom `train_step`."""
    rows = []
    for title, measure, devices, column, form, note in (
        ("examples/s, 2 devices", "examples_per_second", 2, "value", ",.0f", ""),
        ("peak memory, 2 devices", "examples_per_second", 2, "peak_memory_mb", ",.0f", " MB"),
    ):
        key = {"workload": "dcgan", "num_devices": devices, "contender": "parallel"}
        key |= {"measure": measure}
        values = (
            results.median(f"peer_{column}", "throughput", **key, peer="fit"),
            results.median(f"peer_{column}", "throughput", **key, peer="mirrored"),
            results.median(column, "throughput", **key, peer="fit"),
        )
        rows.append([title, *(f"{value:{form}}{note}" for value in values)])
    return markdown_table(
        ["custom `train_step`, DCGAN", "Keras `fit`, 1 device", "MirroredStrategy", "towers"], rows
    )


def data(results: Results) -> str:
    """Returns the table of readers."""
    rows = []
    for row in results.of("data"):
        speed = row["value"] if row["value"] == "killed" else f"{float(row['value']):,.0f}"
        rows.append([row["contender"], speed, row["peak_memory_mb"]])
    return markdown_table(["reader", "examples/s", "peak memory, MiB"], rows)


def exchange(results: Results) -> str:
    """Returns the table of milliseconds of a sum over workers, and of the ratios to a ring."""
    rows = []
    for size in _EXCHANGED:
        cells = [size]
        for workers in _WORKERS:
            key = {"workload": size, "num_devices": workers, "contender": "exchange"}
            key |= {"peer": "ring", "measure": "ms"}
            ms, ratio = (
                results.median(column, "exchange", **key) for column in ("value", "median_ratio")
            )
            cells.append(f"{ms:,.0f} ms, {ratio:.2f}")
        rows.append(cells)
    return markdown_table(["bytes", *(f"{workers} workers" for workers in _WORKERS)], rows)


def recovery(results: Results) -> str:
    """Returns the table of seconds after the loss of a worker."""
    rows = []
    for fault, title in FAULTS.items():
        key = {"workload": "cnn", "num_devices": 2, "contender": fault}
        restart = results.median("value", "recovery", **key, measure="restart_seconds")
        after = results.spread("value", ".1f", "recovery", **key, measure="next_step_seconds")
        rows.append([title, f"{restart:.1f}", after])
    return markdown_table(["fault", "seconds to the restart", "seconds to the next step"], rows)


def memory(results: Results) -> str:
    """Returns the table of estimated and measured megabytes."""
    rows = [
        [
            row["workload"],
            *(f"{float(row[column]):.0f} MB" for column in ("value", "peer_value")),
            f"{float(row['ratio']):.2f}",
        ]
        for row in results.of("memory")
    ]
    return markdown_table(["model", "estimate", "process", "ratio"], rows)


def placements(results: Results) -> str:
    """Returns the table of placements: ratios to a peer."""
    rows = []
    for title, (contender, peer, name) in _PLACEMENTS.items():
        key = {"workload": "resnet50", "num_devices": 8, "contender": contender, "peer": peer}
        measure, unit = "cpu_seconds_per_step", "of their CPU time"
        if contender == "copies":
            measure, unit = "examples_per_second", "of its examples per second"
        first, each = (
            results.median("ratio", "placements", **key, measure=m)
            for m in ("first_step_seconds", measure)
        )
        rows.append([title, name, f"{first:.2f}", f"{each:.2f} {unit}"])
    header = ["placement", "compared with", "time of the first step, ratio", "each step, ratio"]
    return markdown_table(header, rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "machine": measured_machine,
    "summary": summary,
    "throughput": throughput,
    "epochs": epochs,
    "others": others,
    "first_epochs": first_epochs,
    "exactness": exactness,
    "outcomes": outcomes,
    "cases": cases,
    "dcgan": dcgan,
    "data": data,
    "exchange": exchange,
    "recovery": recovery,
    "memory": memory,
    "placements": placements,
}


def fill_in(page: Path, text: str, results: Results) -> tuple[str, list[str]]:
    """Returns the text of a page with the figures of these results between its marks.

    A table whose rows were not measured keeps its text. The returned list says what it lacks.

    Raises:
        ValueError: The page lacks the marks of a table or has them twice.
    """
    missing = []
    for name in PAGES[page]:
        begin, end = f"<!-- figures: {name} -->\n", "<!-- end -->"
        count = text.count(begin)
        if count != 1:
            raise ValueError(f"{page.name} has {count} places for the figures of {name!r}, not 1.")
        before, rest = text.split(begin)
        try:
            table = TABLES[name](results)
        except LookupError as error:
            missing.append(f"{page.name} keeps its old {name!r}: {error}")
            continue
        text = before + begin + table + "\n" + rest[rest.index(end) :]
    return text, missing


def main() -> list[str]:
    """Rewrites the pages; prints and returns what the results lack."""
    results = Results()
    missing = []
    for page in PAGES:
        text, lacking = fill_in(page, page.read_text(encoding="utf-8"), results)
        page.write_text(text, encoding="utf-8")
        missing += lacking
    print(*missing, sep="\n")
    return missing


if __name__ == "__main__":
    main()
