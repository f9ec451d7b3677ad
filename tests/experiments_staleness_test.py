"""experiments/staleness.py with few updates: its table, its picture, its errors."""

import csv
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]


def run(*arguments):
    return forked.run("-m", "experiments.staleness", *arguments, cwd=ROOT)


def test_a_table_and_a_picture_of_each_number_of_towers(tmp_path):
    done = run("--towers=1,3", "--updates=30", "--batch_size=16", f"--out_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "not reproducible" in done.stdout
    with (tmp_path / "staleness.csv").open(newline="") as file:
        alone, three = csv.DictReader(file)
    assert list(alone) == ["towers", "updates", "staleness_mean", "staleness_max", "accuracy",
                           "examples_per_second"]
    assert (alone["towers"], alone["updates"], float(alone["staleness_mean"])) == ("1", "30", 0.0)
    assert three["towers"] == "3" and 0 < float(three["staleness_mean"]) <= 29
    assert 0.1 < float(alone["accuracy"]) <= 1
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_ends_in_one_line():
    for arguments, error in (
        (["--towers=two", "--out_dir=x"], "--towers (two) must be numbers"), ([], "--out_dir"),
    ):
        done = run(*arguments)
        last = done.stderr.splitlines()[-1]  # TensorFlow's own come first
        assert done.returncode == 2 and last.startswith("error: ") and error in last, done.stderr
