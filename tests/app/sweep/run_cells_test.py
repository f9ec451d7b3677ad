"""A sweep's cells; run_sweep with scripts in the place of train.py: failures, files, signals."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import has_ended, wait_for
from towers.app.config import TrainConfig
from towers.app.sweep.run_cells import make_cells, run_sweep


LISTS = {"models": ["cnn"], "dropouts": [], "batch_sizes": ["64"], "gpu_counts": ["1"]}


def cells(shared=TrainConfig(), **lists):
    return make_cells(**{**LISTS, **lists}, shared=shared)


def test_the_cells_are_all_combinations_batches_before_gpu_counts():
    found = cells(TrainConfig(num_towers=4), models=["cnn", "mlp"], dropouts=["0.25"],
                  batch_sizes=["64", "66"], gpu_counts=["1", "2"])
    assert [row[:5] for row in found] == [
        (f"{model} dropout=0.25", batch, shard, gpus, 4) for model in ("cnn", "mlp")
        for batch, shard in ((64, 16), (66, 17)) for gpus in (1, 2)
    ]
    assert list(found.values())[-1] == TrainConfig(
        num_towers=4, model="mlp", dropout=0.25, batch_size=66, num_gpus=2
    )


@pytest.mark.parametrize("change, message", [
    ({"batch_sizes": []}, r"batch_sizes \(\) must be a list of .* such as batch_sizes=64,128"),
    ({"gpu_counts": ["1", "two"]}, r"gpu_counts \(1,two\) must be a list of different whole"),
    ({"gpu_counts": ["1.5"]}, r"gpu_counts \(1.5\)"),
    ({"batch_sizes": ["64", "0"]}, r"batch_sizes \(64,0\)"),
    ({"batch_sizes": ["64", "064"]}, r"batch_sizes \(64,064\)"),
    ({"models": ["cnn", ""]}, r"model \(cnn,\)"),
    ({"dropouts": ["0", "half"]}, r"dropout \(0,half\)"),
    ({"dropouts": ["1.0"]}, r"dropout \(1.0\) must be a number from 0 to below 1"),
    ({"shared": TrainConfig(num_towers=2), "gpu_counts": ["4"]}, r"num_towers \(2\) is below the"),
])
def test_what_no_run_could_have_is_an_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message):
        cells(**change)


def sweep(path, text, shared=TrainConfig(), gpu_counts=("1", "2"), **options):
    """The rows of a sweep in a directory; `text` is the script that plays train.py."""
    cells = make_cells(["cnn"], [], ["64"], gpu_counts, shared)
    return run_sweep(cells, shared, path, [sys.executable, "-c", text], **options)


@pytest.mark.parametrize("text, expected", [
    ("import sys; print('noise', file=sys.stderr); sys.exit(f'error: {sys.argv[1:3]} are wrong.')",
     "['--num_gpus=1', '--batch_size=64'] are wrong."),
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("raise SystemExit(1)", "the run ended with exit code 1"),
    ("import os; os.kill(os.getpid(), 9)", "the run was killed by SIGKILL (is there too little m"),
    ("pass", "the run left no figures: FileNotFoundError"),
])
def test_a_failed_cell_is_a_row_and_the_sweep_goes_on(text, expected, tmp_path, capsys):
    rows = sweep(tmp_path / "out", text)
    assert [row.num_gpus for row in rows] == [1, 2] and rows[0].error.startswith(expected)
    with (tmp_path / "out" / "sweep.csv").open(newline="") as file:
        assert [line["error"] for line in csv.DictReader(file)] == [row.error for row in rows]
    assert sorted(os.listdir(tmp_path / "out")) == ["sweep.csv", "sweep.json"]
    assert "Advice    No cell could run: " in capsys.readouterr().out


def test_cells_with_a_row_are_not_run_again_unless_they_failed_and_shall_be(tmp_path):
    text = f"open({str(tmp_path / 'log')!r}, 'a').write('x')\n1 / 0"
    for options, runs in (({}, 2), ({}, 2), ({"gpu_counts": ("1", "2", "3")}, 3),
                          ({"retry_failed": True}, 5)):
        sweep(tmp_path / "out", text, **options)
        assert len((tmp_path / "log").read_text()) == runs


def test_another_sweep_or_machine_is_an_error_with_what_differs(tmp_path):
    sweep(tmp_path, "pass", TrainConfig(seed=1))
    path = tmp_path / "sweep.json"
    settings = json.loads(path.read_text())
    with pytest.raises(ValueError, match=r"other settings: epochs \(12 there, 4 now\)\. Give the"):
        sweep(tmp_path, "pass", TrainConfig(epochs=4, seed=1))
    path.write_text(json.dumps({**settings, "machine": "another"}))
    with pytest.raises(ValueError, match=r"other settings: machine \(another there"):
        sweep(tmp_path, "pass", TrainConfig(seed=1))
    del settings["machine"], settings["seed"]  # of an earlier version: the default, then
    path.write_text(json.dumps(settings))
    sweep(tmp_path, "pass")


@pytest.mark.parametrize("name, text", [("letter.txt", ""), ("sweep.json", '{"model"')])
def test_a_directory_of_something_else_is_left_as_it_is(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"out_dir \(.*\) cannot be used: .* Name a new directory"):
        sweep(tmp_path, "pass")
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == text


SWEEP = """
import sys
from pathlib import Path
from tests.app.sweep.run_cells_test import sweep
from towers.app.command_line import exit_code
sys.exit(exit_code(lambda: sweep(Path("out"), {text!r})))
"""
WAITS = """
import os, sys, time
if '--num_gpus=1' in sys.argv:
    sys.exit('error: one is none.')
open('pid', 'w').write(f'{os.getpid()}\\n')
time.sleep(100)
"""


@pytest.mark.parametrize("number, code", [
    (signal.SIGINT, 130), (signal.SIGTERM, 143),
    pytest.param(signal.SIGKILL, -9, marks=pytest.mark.skipif(
        sys.platform != "linux", reason="Linux alone knows prctl")),
])
def test_a_signal_keeps_the_cells_done_and_kills_the_one_that_runs(number, code, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP.format(text=WAITS)], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    (pid,) = wait_for(tmp_path / "pid", seconds=60)
    with pytest.raises(ValueError, match=r"out_dir \(.*out\) is in use by another sweep"):
        sweep(tmp_path / "out", "pass")
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, has_ended(int(pid))) == (code, True)
    assert (tmp_path / "out" / "sweep.csv").read_text().endswith(",one is none.,,\n")
    if code > 0:
        assert stdout.endswith("Run the command again to continue with the rest.\n")
        assert stderr.startswith("stopped by ") and stderr.count("\n") == 1
