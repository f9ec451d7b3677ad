"""benchmarks/machines.py on real workers; how fast they are, it does not ask."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import process

ROOT = Path(__file__).parents[1]


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


def test_a_worker_that_fails_says_why():
    with pytest.raises(RuntimeError, match="No module named benchmarks.nothing"):
        process.run_workers("nothing", 2)
    written = "[worker 1] Traceback:\n[worker 1] ValueError: no\n"
    assert process.cause(written) == "[worker 1] ValueError: no"
