"""Examples per second at the same global batch: towers against its peers, in rounds.

    python benchmarks/throughput.py --workloads=cnn,notebook_cnn,mlp41m,gru --rounds=3

Each round runs every contender once, each in a fresh process; ratios are taken within a round.
Draws a chart of the whole CSV: docs/images/throughput.png, or beside another --out.
"""

import sys
from pathlib import Path

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import chart, rounds  # noqa: E402  (found through the line above)

_WORKLOADS = flags.DEFINE_list(
    "workloads", ["cnn", "notebook_cnn", "mlp41m", "gru"], "Names in workloads.py."
)
_CONTENDER = flags.DEFINE_string("contender", "towers", "The contender to compare with the peers.")
_PEERS = flags.DEFINE_list(
    "peers", ["fit", "mirrored", "central", "limit"], "Contenders of contender.py to compare with."
)
_DEVICES = flags.DEFINE_integer(
    "num_devices", None, "GPUs, or logical CPU devices without any, the same for all contenders; "
    "fit takes one of them. Default: all GPUs, or the workload's towers_per_core times the cores."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender, in turn.", lower_bound=1)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Timed steps of one run. Default: the workload's, 4 to 8 seconds on 2 cores; "
    "take more on GPUs.", lower_bound=2,
)
_OUT = flags.DEFINE_string("out", "benchmarks/results/throughput.csv", "CSV to append to.")
_CHART = flags.DEFINE_string("chart", None, "The chart of all of the CSV. Default: "
                             "docs/images/throughput.png; with --out=FILE.csv, FILE.png.")


def main(argv: list[str]) -> None:
    """Measures, prints, appends to the CSV after each workload, and draws the chart."""
    del argv
    out, rows = Path(_OUT.value), []
    for workload in _WORKLOADS.value:
        print(workload, flush=True)
        given = {"num_devices": _DEVICES.value, "steps": _STEPS.value}
        given = {name: value for name, value in given.items() if value is not None}
        contenders = {
            name: {"contender": name, "workload": workload, **given}
            for name in [_CONTENDER.value, *_PEERS.value]
        }
        results = rounds.run_rounds("contender", contenders, _ROUNDS.value)
        ours = results[0][_CONTENDER.value]
        shared = {name: ours[name] for name in ("num_devices", "steps")}
        new = rounds.compare(
            results, _CONTENDER.value, "examples_per_second", workload=workload, **shared
        )
        if new:
            rounds.append_csv(out, new)
        rows += new
    print(rounds.table(rows))
    if rows:
        beside = out.with_suffix(".png") if _OUT.present else "docs/images/throughput.png"
        chart.draw(out, Path(_CHART.value or beside))


if __name__ == "__main__":
    app.run(main)
