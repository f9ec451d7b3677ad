"""sweep.py as a user calls it: a small real sweep, cells that fail, Ctrl-C, wrong flags."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from towers.config import TrainConfig
from towers.sweep.cells import Cell
from towers.sweep.run import error_line, run_sweep

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


# In the place of train.py, scripts that fail in its ways.

CELLS = [Cell("cnn", None, 64, 1), Cell("cnn", None, 64, 2)]


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_a_failed_cell_is_a_row_and_the_sweep_goes_on(tmp_path, capsys):
    train = script(tmp_path, "import sys\nsys.exit(f'error: {sys.argv[2:]} makes no sense.')")
    rows = run_sweep(CELLS, TrainConfig(), tmp_path / "out", train)
    errors = [
        "['--num_gpus=1', '--batch_size=64'] makes no sense.",
        "['--num_gpus=2', '--batch_size=64'] makes no sense.",
    ]
    assert [row.error for row in rows] == errors
    assert [row["error"] for row in read(tmp_path / "out" / "sweep.csv")] == errors
    wrote, last = capsys.readouterr().out.splitlines()[-2:]
    assert wrote == f"Wrote     {tmp_path}/out/sweep.csv"
    assert last == f"Advice    No cell could run: {errors[0]}"


def test_failed_cells_run_again_only_when_asked_to(tmp_path, capsys):
    log = tmp_path / "log"
    train = script(tmp_path, f"open({str(log)!r}, 'a').write('x')\n1 / 0")
    out = tmp_path / "out"
    (row, _) = run_sweep(CELLS, TrainConfig(), out, train)
    assert row.error == "ZeroDivisionError: division by zero"
    run_sweep(CELLS, TrainConfig(), out, train)
    assert log.read_text() == "xx"
    assert "Cells     2: 0 done before, 2 failed (--retry_failed tries again)" in (
        capsys.readouterr().out
    )
    run_sweep(CELLS, TrainConfig(), out, train, retry_failed=True)
    assert log.read_text() == "xxxx"


@pytest.mark.parametrize(
    ("code", "stderr", "expected"),
    [
        (2, "noise\nerror: --model is wrong.\n", "--model is wrong."),
        (1, "Traceback:\n  File x\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        (1, "", "exit code 1, without a word"),
        (-9, "", "killed by SIGKILL; is there too little memory?"),
        (-11, "Fatal Python error: Segmentation fault\n", "killed by SIGSEGV"),
    ],
)
def test_an_error_is_one_line(code, stderr, expected):
    assert error_line(code, stderr) == expected


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_cells_done_and_kills_the_one_that_runs(number, code, tmp_path):
    train = script(tmp_path, f"""
import os, sys, time
if '--num_gpus=1' in sys.argv:
    sys.exit('error: one is none.')
open({str(tmp_path / "pid")!r}, 'w').write(f'{{os.getpid()}}\\n')
time.sleep(100)
""")
    code_of_sweep = f"""
import sys
from pathlib import Path
from tests.sweep_test import CELLS
from towers.command_line import exit_code
from towers.config import TrainConfig
from towers.sweep.run import run_sweep
sys.exit(exit_code(lambda: run_sweep(CELLS, TrainConfig(), Path("out"), Path({str(train)!r}))))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code_of_sweep],
        cwd=tmp_path,
        env={**environment(), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid, deadline = tmp_path / "pid", time.monotonic() + 60
    while not (pid.exists() and pid.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stdout.splitlines()[-1] == (
        "1 of 2 cells are done. The same command goes on with the rest."
    )
    assert stderr.startswith("stopped by ") and stderr.count("\n") == 1
    (row,) = read(tmp_path / "out" / "sweep.csv")
    assert (row["num_gpus"], row["error"]) == ("1", "one is none.")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_two_sweeps_in_one_directory_are_refused(tmp_path):
    from towers.sweep.directory import opened

    with opened(tmp_path / "out", TrainConfig()):
        with pytest.raises(ValueError, match=r"--out_dir \(.*out\) is in use by another sweep"):
            run_sweep(CELLS, TrainConfig(), tmp_path / "out", tmp_path / "script.py")


def test_a_damaged_settings_file_is_refused(tmp_path):
    (tmp_path / "sweep.json").write_text('{"model"')
    with pytest.raises(ValueError, match=r"sweep.json is damaged \(.*\); name another --out_dir"):
        run_sweep(CELLS, TrainConfig(), tmp_path, tmp_path / "script.py")
