"""sweep.py as a user calls it: a small real sweep, and wrong flags."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

SWEEP = Path(__file__).parent.parent / "sweep.py"
TINY = """
import keras

def build(input_shape, num_classes):
    layers = keras.layers
    return keras.Sequential([
        keras.Input(input_shape), layers.Flatten(), layers.Dense(num_classes, "softmax"),
    ])
"""


def sweep(*flags, cwd):
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND", "PYTHONPATH")
    return subprocess.run(
        [sys.executable, SWEEP, *flags], cwd=cwd, capture_output=True, text=True, timeout=300,
        env={k: v for k, v in os.environ.items() if k not in hidden}, check=False,
    )


def test_a_sweep_leaves_table_picture_runs_and_advice_and_goes_on(tmp_path):
    (tmp_path / "tiny.py").write_text(TINY)
    flags = ["--models=tiny:build", "--dataset=synthetic", "--batch_sizes=2048", "--max_steps=3",
             "--gpu_counts=1,3", "--device=cpu", "--out_dir=out"]
    done = sweep(*flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "out"
    assert sorted(os.listdir(out)) == ["cells", "sweep.csv", "sweep.json", "sweep.png"]
    run = out / "cells" / "tiny_build-batch2048-gpus3"
    assert {"config.json", "results.csv", "final.keras", "log.txt"} <= {*os.listdir(run)}

    with (out / "sweep.csv").open(newline="", encoding="utf-8") as file:
        one, three = csv.DictReader(file)
    assert [three[name] for name in ("num_gpus", "per_tower_batch", "num_towers", "epochs")] == [
        "3", "683", "3", "1"
    ]
    ratio = float(three["examples_per_second"]) / float(one["examples_per_second"])
    assert float(three["speedup"]) == pytest.approx(ratio, rel=1e-4)
    assert float(three["efficiency"]) == pytest.approx(ratio / 3, rel=1e-4)
    with (run / "results.csv").open(newline="", encoding="utf-8") as file:
        (result,) = csv.DictReader(file)
    assert {result[n] == three[n] for n in ("accuracy", "val_accuracy", "seconds")} == {True}

    lines = done.stdout.splitlines()
    assert lines[:2] == ["towers 0.1 | sweep: out", "Cells     2, 2 to run"]
    assert lines[2].startswith("1/2  tiny:build  batch 2,048 on 1, 2,048 a tower  ")
    assert lines[3].startswith("2/2  tiny:build  batch 2,048 on 3,   683 a tower  ")
    assert lines[2].endswith(" left") and lines[4] == "Wrote     out/sweep.csv, out/sweep.png"
    assert lines[5].startswith("Advice    On logical CPU devices, which say little about GPUs, ")

    again = sweep(*flags, cwd=tmp_path)
    assert again.stdout.splitlines() == [lines[0], "Cells     2, 0 to run", *lines[4:]]
    other = sweep(*flags, "--max_steps=4", "--seed=1", cwd=tmp_path)
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr.startswith(
        "error: --out_dir (out) holds a sweep with other settings: --max_steps (3 there, 4 now), "
        "--seed (0 there, 1 now). Give the same ones"
    )


@pytest.mark.parametrize("flags, message", [
    (["--batch_sizes="], "--batch_sizes () must be a list of different whole numbers"),
    (["--gpu_counts=1,two"], "such as --gpu_counts=1,2,4,8"),
    (["--batch_size=64"], "Unknown command line flag 'batch_size'. Did you mean: batch_sizes"),
    (["--epochs=0"], "flag --epochs=0: 0 is not a positive integer"),
    (["--epochs=x"], "flag --epochs=x: invalid literal for int()"),
    (["64"], "'64' is not a flag."),
    (["--out_dir=file"], "--out_dir (file) cannot be used: "),
    (["--out_dir=."], "--out_dir (.) cannot be used: "),
])
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, message, tmp_path):
    (tmp_path / "file").touch()
    done = sweep(*flags, cwd=tmp_path)
    assert (done.returncode, done.stdout, os.listdir(tmp_path)) == (2, "", ["file"])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr
