"""run_sweep: in the place of train.py, scripts that fail in its ways; and signals."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import has_ended
from tests.sweep_test import environment, read
from towers.app.config import TrainConfig
from towers.app.sweep.cells import Cell
from towers.app.sweep.run_cells import error_line, run_sweep

ROOT = Path(__file__).parents[3]
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


def start(tmp_path):
    """(a sweep's process, its cell's id), once the second cell runs."""
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
from tests.app.sweep.run_cells_test import CELLS
from towers.app.command_line import exit_code
from towers.app.config import TrainConfig
from towers.app.sweep.run_cells import run_sweep
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
    return process, int(pid.read_text())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_cells_done_and_kills_the_one_that_runs(number, code, tmp_path):
    process, pid = start(tmp_path)
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
        os.kill(pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows prctl")
def test_a_cell_ends_with_a_sweep_that_is_killed(tmp_path):
    process, pid = start(tmp_path)
    process.kill()
    assert has_ended(pid)
    process.communicate()
