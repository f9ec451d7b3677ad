"""Compares two devices with one in 40 cases: MirroredStrategy, DDP, keras.distribution and towers.

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install keras==3.15.1 numpy jax torch    # a CPU build of torch is enough
    python benchmarks/exactness.py --peers_python=/tmp/peers/bin/python

takes about 12 minutes on 2 cores. All trainings are in float64, for 2 epochs of SGD with momentum
and a global batch of 8. A case's reference is the same training on one device with the same
backend of Keras. The difference is the largest one of a weight, divided by the largest weight; with
metrics, the relative differences of the last epoch's logs count, too.

    exact           a difference of at most 1e-10, or 1e-6 with PyTorch and JAX
    error           an exception, whose line the results keep
    silently wrong  a larger difference, or a value that is not finite
    hung            no result within --limit seconds
    not offered     metrics with DDP, because the loop is the user's

With PyTorch and JAX, Keras computes some operations in float32, even if the float type is float64.

Each tool is used as its guide says. MirroredStrategy and keras.distribution train by `fit`; a
custom step divides its loss by the number of replicas, as TensorFlow's guide does. With DDP, the
loop of Keras' guide to PyTorch takes the model's own loss, a DistributedSampler without shuffling,
no_sync to accumulate, and clip_grad_norm_ and GradScaler of PyTorch.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import exactness_tables as tables
from benchmarks.process import run_process
from benchmarks.rounds import append_csv

_PEERS_PYTHON = flags.DEFINE_string(
    "peers_python", None, "A Python with keras, torch and jax; without it, ddp and jax are left out"
)
_WAYS = flags.DEFINE_list("ways", list(tables.TITLES), "The ways to compare.")
_CASES = flags.DEFINE_list("cases", [], "Names of cases without commas; empty for all.")
_LIMIT = flags.DEFINE_float("limit", 120.0, "Seconds of a case, after which it counts as hung.")
_OUT = flags.DEFINE_string("out", None, "A CSV file to which the results are appended.")


def make_rows(way: str, found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row of results for each case."""
    return [
        {
            "benchmark": tables.BENCHMARK,
            "workload": case,
            "data": result["group"],
            "num_devices": 2,
            "contender": way,
            "measure": "difference",
            "round": 0,
            "value": str(result["value"]),
        }
        for case, result in found.items()
    ]


def main(argv: Sequence[str]) -> None:
    """Measures, prints and writes the differences."""
    del argv
    for way in _WAYS.value:
        python = sys.executable
        if way in ("ddp", "jax"):
            if _PEERS_PYTHON.value is None:
                print(f"{way} is left out: set --peers_python", flush=True)
                continue
            python = _PEERS_PYTHON.value
        found = run_process(
            "exactness_ways.measure",
            python=python,
            way=way,
            cases=_CASES.value or None,
            limit_of_case=_LIMIT.value,
        )
        rows = make_rows(way, found)
        for row in rows:
            outcome = tables.outcome(way, row["value"])
            print(f"{way:9}  {outcome:14}  {row['workload']}  ({row['value']})", flush=True)
        append_csv(_OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
