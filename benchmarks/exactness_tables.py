"""Reads the rows of benchmarks/exactness.py and makes the tables of docs/measured.md from them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

BENCHMARK = "exactness_cases"  # the name of these rows in results.csv
TITLES = {
    "mirrored": "MirroredStrategy",
    "ddp": "Keras on PyTorch, DDP",
    "jax": "Keras on JAX, `keras.distribution`",
    "towers": "towers",
}
# Keras computes some operations in float32 on PyTorch and JAX, even if the float type is float64.
TOLERANCES = {"mirrored": 1e-10, "ddp": 1e-6, "jax": 1e-6, "towers": 1e-10}
OUTCOMES = ("exact", "error", "silently wrong", "hung", "not offered")


def outcome(way: str, value: str) -> str:
    """Returns one of `OUTCOMES` for a result: a difference, "refused: ERROR", or the outcome."""
    if value.startswith("refused: "):
        return "error"
    if value in OUTCOMES:
        return value
    return "exact" if float(value) <= TOLERANCES[way] else "silently wrong"


def count_outcomes(rows: Iterable[Mapping[str, str]]) -> list[list[str]]:
    """Returns the cells of a table: a way, and how many cases have each outcome."""
    found: dict[str, Counter[str]] = {way: Counter() for way in TITLES}
    for row in rows:
        found[row["contender"]][outcome(row["contender"], row["value"])] += 1
    return [
        [TITLES[way], *(str(counts[name]) for name in OUTCOMES)] for way, counts in found.items()
    ]


def list_cases(rows: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Returns the cells of a table: a case, and its outcome or difference for each way."""
    values = {(row["workload"], row["contender"]): row["value"] for row in rows}
    table = []
    for case in dict.fromkeys(row["workload"] for row in rows):
        cells = []
        for way in TITLES:
            if (case, way) not in values:
                raise LookupError(f"{BENCHMARK} has no row of {case} with {way}")
            value = values[case, way]
            found = outcome(way, value)
            cells.append(f"{float(value):.2g}" if found == "silently wrong" else found)
        table.append([case, *cells])
    return table


def split_cases(table: Sequence[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Returns the rows of `list_cases` in which some way is not exact, and the other cases."""
    differ = [row for row in table if set(row[1:]) != {"exact"}]
    return differ, [row[0] for row in table if row not in differ]
