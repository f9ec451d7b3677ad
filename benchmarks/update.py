"""The sum and update of a model's gradients on the CPU, by the threads that TensorFlow has.

    python benchmarks/update.py --workload=mlp41m --threads=2 --rounds=5

XLA cuts the loops of its one program by rows, a part a thread. Prints the bytes per second that go
through memory, which are the limit, and fails where the threads change a bit.
"""

import statistics
import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds  # noqa: E402  (found through the line above)

_WORKLOAD = flags.DEFINE_string("workload", "mlp41m", "A name in workloads.py.")
_SUMS = flags.DEFINE_integer("sums", 2, "Gradients that are added: T towers' on CPUs, 1 of GPUs.")
_THREADS = flags.DEFINE_integer("threads", 2, "Compared with one.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each, in turn.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "benchmarks/results/update.csv", "CSV to append to.")


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV."""
    del argv
    given = {"workload": _WORKLOAD.value, "sums": _SUMS.value}
    contenders = {
        name: {**given, "threads": threads}
        for name, threads in ((f"{_THREADS.value} threads", _THREADS.value), ("1 thread", 1))
    }
    results = rounds.run_rounds("update_case", contenders, _ROUNDS.value)
    digests = {measured["digest"] for one in results for measured in one.values()}
    if len(digests) > 1:
        raise SystemExit(f"error: the threads change bits: {sorted(digests)}")
    first, *_ = contenders
    rows = rounds.compare(
        results, first, "ms", workload=_WORKLOAD.value, num_devices=_SUMS.value,
        steps=results[0][first]["steps"], passes=results[0][first]["passes"],
    )
    rounds.append_csv(Path(_OUT.value), rows)
    print(rounds.table(rows))
    for name in contenders:
        rates = [one[name]["gb_per_second"] for one in results]
        print(f"{name}: {statistics.median(rates):.1f} GB/s")


if __name__ == "__main__":
    app.run(main)
