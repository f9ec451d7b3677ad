"""sweep.py as a user calls it: a small real sweep, and wrong flags."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SWEEP = ROOT / "sweep.py"
TINY = """
import keras

def build(input_shape, num_classes):
    layers = keras.layers
    return keras.Sequential([
        keras.Input(input_shape), layers.Flatten(), layers.Dense(num_classes, "softmax"),
    ])
"""


def environment():
    """Without what the tests' own process sets for TensorFlow."""
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND", "PYTHONPATH")
    return {k: v for k, v in os.environ.items() if k not in hidden}


def sweep(*flags, cwd):
    return subprocess.run(
        [sys.executable, SWEEP, *flags],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A sweep of two cells, whose output and directory several tests look at."""
    cwd = tmp_path_factory.mktemp("sweep")
    (cwd / "tiny.py").write_text(TINY)
    flags = ["--models=tiny:build", "--dataset=synthetic", "--batch_sizes=2048", "--max_steps=3",
             "--gpu_counts=1,3", "--device=cpu", "--out_dir=out"]
    return sweep(*flags, cwd=cwd), cwd, flags


def test_a_sweep_leaves_a_table_a_picture_and_the_cells_runs(small):
    done, cwd, _ = small
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(cwd / "out")) == ["cells", "sweep.csv", "sweep.json", "sweep.png"]
    assert sorted(os.listdir(cwd / "out" / "cells")) == [
        "tiny_build-batch2048-gpus1", "tiny_build-batch2048-gpus3",
    ]
    run = set(os.listdir(cwd / "out" / "cells" / "tiny_build-batch2048-gpus1"))
    assert {"config.json", "results.csv", "final.keras", "log.txt"} <= run


def test_its_rows_have_every_figure_but_a_gpus_memory(small):
    one, three = read(small[1] / "out" / "sweep.csv")
    assert [one["num_gpus"], one["per_tower_batch"]] == ["1", "2048"]
    assert [three["num_gpus"], three["per_tower_batch"], three["num_towers"]] == ["3", "683", "3"]
    for row in (one, three):
        assert (row["device_memory_mb"], row["error"], row["epochs"]) == ("", "", "1")
        assert 100 < float(row["host_memory_mb"]) < 20_000
        assert float(row["seconds"]) > 0 and 0 <= float(row["val_accuracy"]) <= 1
    ratio = float(three["examples_per_second"]) / float(one["examples_per_second"])
    assert float(three["speedup"]) == pytest.approx(ratio, rel=1e-4)
    assert float(three["efficiency"]) == pytest.approx(ratio / 3, rel=1e-4)
    results = read(small[1] / "out" / "cells" / "tiny_build-batch2048-gpus3" / "results.csv")
    assert three["examples_per_second"] == results[0]["examples_per_second"]


def test_in_a_pipe_it_prints_a_line_a_cell_and_ends_with_one_sentence(small):
    lines = small[0].stdout.splitlines()
    assert lines[:2] == ["towers 0.1 | sweep: out", "Cells     2"]
    assert lines[2].startswith("1/2  tiny:build  batch 2,048 on 1, 2,048 a tower  ")
    assert lines[2].endswith(" left")
    assert lines[3].startswith("2/2  tiny:build  batch 2,048 on 3,   683 a tower  ")
    assert lines[4] == "Wrote     out/sweep.csv, out/sweep.png"
    assert lines[5].startswith("Advice    On logical CPU devices, which say little about GPUs, ")
    assert len(lines) == 6


def test_the_same_command_runs_no_cell_again(small):
    done, cwd, flags = small
    before = (cwd / "out" / "sweep.csv").read_bytes()
    again = sweep(*flags, cwd=cwd)
    assert (again.returncode, again.stderr) == (0, "")
    lines = again.stdout.splitlines()
    assert lines[1:3] == ["Cells     2: 2 done before", "Wrote     out/sweep.csv, out/sweep.png"]
    assert lines[3] == done.stdout.splitlines()[5]
    assert (cwd / "out" / "sweep.csv").read_bytes() == before


def test_other_settings_are_refused_with_the_difference(small):
    _, cwd, flags = small
    done = sweep(*flags, "--max_steps=4", "--seed=1", cwd=cwd)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: --out_dir (out) holds a sweep with other settings: --max_steps (3 there, 4 now), "
        "--seed (0 there, 1 now). Give the same ones to go on with it, or name another directory.\n"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch_sizes="], "--batch_sizes is empty; give a list such as --batch_sizes=64,128"),
        (["--gpu_counts=1,two"], "--gpu_counts (1,two): 'two' is not a whole number"),
        (["--gpu_counts=0"], "--gpu_counts (0) must be at least 1 each."),
        (["--batch_size=64"], "Unknown command line flag 'batch_size'. Did you mean: batch_sizes"),
        (["--epochs=0"], "--epochs (0) must be at least 1"),
        (["--epochs=x"], "flag --epochs=x: invalid literal for int()"),
        (["64"], "'64' is not a flag."),
        (["--out_dir=file"], "--out_dir (file) cannot be used: File exists."),
        (["--out_dir=."], "--out_dir (.) is not empty and holds no sweep"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, message, tmp_path):
    (tmp_path / "file").touch()
    done = sweep(*flags, cwd=tmp_path)
    assert (done.returncode, done.stdout, os.listdir(tmp_path)) == (2, "", ["file"])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_help_lists_the_flags(tmp_path):
    done = sweep("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--batch_sizes: Global batches" in done.stdout and "--[no]retry_failed" in done.stdout
