"""benchmarks/machines.py on real workers; how fast they are, it does not ask."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import scaling

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]


@pytest.mark.matrix
def test_the_command_writes_each_part_to_its_csv(tmp_path):
    """20 MB are 8 large tensors, which travel one by one; 0.1 MB are 8 that travel as one."""
    command = ["--workloads=tiny", "--workers=2", "--megabytes=0.1,20", "--rounds=1", "--steps=3",
               "--memory_steps=5,20", f"--out={tmp_path}/out.csv"]
    run = subprocess.run(
        [sys.executable, "benchmarks/machines.py", *command], cwd=ROOT, capture_output=True,
        text=True, timeout=280,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [tuple(row[name] for name in ("workload", "contender", "peer", "measure", "round"))
            for row in rows] == [
        ("tiny", "2 workers", "1 worker", "examples_per_second", "0"),
        ("0.1 MB", "exchange", "ring", "ms", "0"),
        ("20 MB", "exchange", "ring", "ms", "0"),
        ("tiny", "20 steps", "5 steps", "memory_mb", "0"),  # a round is a worker
        ("tiny", "20 steps", "5 steps", "memory_mb", "1"),
    ]
    assert all(float(row["value"]) > 0 and float(row["ratio"]) > 0 for row in rows)
    # Of 2 workers each sends half of its sums, and half of its gradients.
    assert [float(row["sent_mb"]) for row in rows[1:3]] == pytest.approx([0.1, 20], rel=0.5)
    assert {row["command"] for row in rows} == {
        " ".join(["python benchmarks/machines.py", *command])
    }


def test_the_model_of_a_step_finds_the_constants_that_made_its_figures():
    true = scaling.Constants(start=1e-3, message=2e-3, wire=4e8, memory=5e9)
    made = {
        (workers, size): max(1, workers / 2) * scaling.exchange_seconds(
            true, workers, size, scaling.sums_of(size)
        )
        for workers in (2, 4, 8) for size in (1e5, 4.8e6, 32e6)
    }
    found = scaling.fit(made, true.memory, cores=2)
    assert (found.start, found.message, found.wire) == pytest.approx(
        (true.start, true.message, true.wire)
    )


def test_a_step_on_more_workers_than_cores_takes_turns():
    """1 s of computation, 4 MB, one sum of 2 x 3 messages: by hand."""
    one = scaling.Constants(start=2e-3, message=1e-3, wire=1e9, memory=1e9)
    size = scaling.Size(parameters=4e6, sums=1, passes=5, batch_size=8)
    assert scaling.predict(one, size, 1.0, "4 towers", cores=2) == pytest.approx(1 + 8 * 4e-3)
    each = 5 * 4e-3 + 8e-3 + 6e-3 + 9e-3  # update, start and messages, 6 MB sent, 9 MB added
    assert scaling.predict(one, size, 1.0, "4 workers", cores=2) == pytest.approx(1 + 2 * each)
