"""A sweep's cells; run_sweep with scripts in the place of train.py; its table, advice and chart."""

import csv
import json
import math
import os
import signal
import subprocess
import sys

import pytest

from tests.processes import has_ended, wait_for
from towers.app.config import TrainConfig
from towers.app.sweep.chart import draw_sweep
from towers.app.sweep.run_cells import make_cells, run_sweep
from towers.app.sweep.table import advice, filled_row, read_table, Row, with_speedups, write_table
from towers.machine.places import LostDirectoryError

LISTS = {"models": ["cnn"], "batch_sizes": ["64"], "gpu_counts": ["1"]}


def cells(shared=TrainConfig(), **lists):
    return make_cells(**{**LISTS, **lists}, shared=shared)


def test_the_cells_are_all_combinations_batches_before_gpu_counts():
    found = cells(
        TrainConfig(num_towers=4),
        models=["cnn", "mlp"],
        batch_sizes=["64", "66"],
        gpu_counts=["1", "2"],
    )
    assert [row[:5] for row in found] == [
        (model, batch, shard, gpus, 4)
        for model in ("cnn", "mlp")
        for batch, shard in ((64, 16), (66, 17))
        for gpus in (1, 2)
    ]
    assert list(found.values())[-1] == TrainConfig(
        num_towers=4, model="mlp", batch_size=66, num_gpus=2
    )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch_sizes": []}, r"batch_sizes \(\) must be a list of .* such as batch_sizes=64,128"),
        ({"gpu_counts": ["1", "two"]}, r"gpu_counts \(1,two\) must be a list of whole"),
        ({"batch_sizes": ["64", "0"]}, r"batch_sizes \(64,0\)"),
        ({"models": ["cnn", ""]}, r"model \(cnn,\)"),
        (
            {"shared": TrainConfig(num_towers=2), "gpu_counts": ["4"]},
            r"num_towers \(2\) is below the",
        ),
    ],
)
def test_what_no_run_could_have_is_an_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message):
        cells(**change)


def sweep(path, text, shared=TrainConfig(), gpu_counts=("1", "2"), **options):
    """The rows of a sweep in a directory; `text` is the script that plays train.py."""
    cells = make_cells(["cnn"], ["64"], gpu_counts, shared)
    return run_sweep(cells, shared, path, [sys.executable, "-c", text], **options)


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "import sys; print('noise', file=sys.stderr); sys.exit(f'error: {sys.argv[1:3]} are wrong.')",
            "['--num_gpus=1', '--batch_size=64'] are wrong.",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "the run was killed by SIGKILL (is there too little m",
        ),
        ("pass", "the run left no figures: FileNotFoundError"),
    ],
)
def test_a_failed_cell_is_a_row_and_the_sweep_goes_on(text, expected, tmp_path, capsys):
    rows = sweep(tmp_path / "out", text)
    assert [row.num_gpus for row in rows] == [1, 2] and rows[0].error.startswith(expected)
    with (tmp_path / "out/sweep.csv").open(newline="") as file:
        assert [line["error"] for line in csv.DictReader(file)] == [row.error for row in rows]
    assert sorted(os.listdir(tmp_path / "out")) == ["sweep.csv", "sweep.json"]
    assert "Advice    No cell could run: " in capsys.readouterr().out


def test_cells_with_a_row_are_not_run_again(tmp_path):
    text = f"open({str(tmp_path / 'log')!r}, 'a').write('x')\n1 / 0"
    for options, runs in (({}, 2), ({}, 2), ({"gpu_counts": ("1", "2", "3")}, 3)):
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


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone knows prctl")
@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGINT, 130),
        (signal.SIGKILL, -9),
    ],
)
def test_a_signal_keeps_the_cells_done_and_kills_the_one_that_runs(number, code, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP.format(text=WAITS)],
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    (pid,) = wait_for(tmp_path / "pid", seconds=60)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, has_ended(int(pid))) == (code, True)
    assert (tmp_path / "out/sweep.csv").read_text().endswith(",one is none.,,\n")
    if code > 0:
        assert stdout.endswith("Run the command again to continue with the rest.\n")
        assert stderr.startswith("stopped by ") and stderr.count("\n") == 1


# sweep.csv: its columns, speed-up and efficiency by hand, the way back from the file; advice
def row(batch_size, num_gpus, speed, model="cnn"):
    """A row of that examples_per_second; None for a cell that failed."""
    cell = Row(model, batch_size, batch_size // num_gpus, num_gpus, num_gpus)
    if speed is None:
        return cell._replace(error="it broke.")
    return cell._replace(examples_per_second=float(speed), val_accuracy=0.5)


def of_speeds(speeds):
    """Rows with speed-ups, from {(global batch, GPUs): examples per second}."""
    return with_speedups([row(*cell, speed) for cell, speed in speeds.items()])


COLUMNS = (
    "model,batch_size,per_tower_batch,num_gpus,num_towers,epochs,accuracy,val_accuracy,seconds,"
    "examples_per_second,speedup,efficiency,host_memory_mb,device_memory_mb,error,noise_scale,"
    "useful_share"
)
RESULTS = """epoch,loss,accuracy,val_loss,val_accuracy,seconds,examples_per_second
1,2.0,0.1,1.5,0.2,10.0,100
2,1.0,0.3,0.9,0.4,6.0,300
"""


def test_a_row_has_the_last_accuracies_all_seconds_and_all_examples_by_all_seconds(tmp_path):
    (tmp_path / "results.csv").write_text(RESULTS)
    done = filled_row(row(64, 1, 0), tmp_path / "results.csv")
    # 300 examples in 3 s and 300 in 1 s are 600 in 4 s.
    assert done[5:10] == (2, 0.3, 0.4, 16.0, pytest.approx(150.0))


def test_speedup_is_against_one_gpu_at_the_same_model_and_batch():
    rows = with_speedups(
        [
            row(64, 4, 300),
            row(64, 1, 100),
            row(256, 4, 9),
            row(64, 4, 50, "mlp"),
            row(64, 1, 500, "mlp"),
        ]
    )
    assert [(r.model, r.batch_size, r.num_gpus, r.speedup, r.efficiency) for r in rows] == [
        ("cnn", 64, 1, 1, 1),
        ("cnn", 64, 4, 3, 0.75),
        ("cnn", 256, 4, None, None),
        ("mlp", 64, 1, 1, 1),
        ("mlp", 64, 4, 0.1, 0.025),
    ]


def test_the_table_comes_back_from_its_file_with_the_figures_of_earlier_versions(tmp_path):
    assert read_table(tmp_path / "sweep.csv") == []
    rows = of_speeds({(64, 1): 100, (64, 2): 150, (128, 1): None})
    rows[0] = rows[0]._replace(epochs=3, val_accuracy=math.inf, host_memory_mb=12.5)
    rows[2] = rows[2]._replace(error='a "quoted", listed error')
    write_table(tmp_path / "sweep.csv", rows)
    lines = (tmp_path / "sweep.csv").read_text().splitlines()
    assert (lines[0], lines[3]) == (
        COLUMNS,
        'cnn,128,128,1,1,,,,,,,,,,"a ""quoted"", listed error",,',
    )
    assert read_table(tmp_path / "sweep.csv") == rows


@pytest.mark.parametrize("text", ["a,b\n1,2\n", COLUMNS + "\nm,x" + "," * 15])
def test_another_file_is_an_error(text, tmp_path):
    (tmp_path / "sweep.csv").write_text(text)
    with pytest.raises(ValueError, match=r"sweep.csv is not what a sweep wrote \(.*\); name an"):
        read_table(tmp_path / "sweep.csv")


def test_a_table_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(LostDirectoryError, match="nowhere/sweep.csv cannot be written .*Make room"):
        write_table(tmp_path / "nowhere/sweep.csv", [])


@pytest.mark.parametrize(
    "speeds, on_gpus, expected",
    [
        (
            {
                (64, 1): 1000,
                (64, 2): 900,
                (64, 4): 800,
                (256, 1): 1200,
                (256, 2): 2000,
                (256, 4): 3000,
            },
            True,
            "cnn is fastest at a global batch of 256 on 4 devices (3,000 examples/s); 2 devices "
            "are faster from a global batch of 256 on; 4 devices are faster from a global batch of 256 on.",
        ),
        (
            {(64, 1): 1000, (64, 2): 700, (1024, 1): 1000, (1024, 2): 900},
            True,
            "1 device (1,000 examples/s); 2 devices are not faster than 1 (0.90 times its speed at a "
            "global batch of 1,024), because a step computes too little for what it moves. Try larger batches or --profile.",
        ),
        (
            {(64, 1): 1000, (64, 2): 700},
            False,
            "On logical CPU devices, which say little about GPUs, cnn is fastest at a global batch of 64 "
            "on 1 device (1,000 examples/s); 2 devices are not faster than 1 (0.70 times its speed at a "
            "global batch of 64), because they share the same cores.",
        ),
        (
            {(64, 1): None, (64, 2): 1000},
            True,
            "; 2 devices have no speed-up, because 1 device was not measured.",
        ),
        # faster by chance at 32: slower again at 64
        (
            {(32, 1): 10, (32, 2): 11, (64, 1): 10, (64, 2): 9, (128, 1): 10, (128, 2): 12},
            True,
            "; 2 devices are faster from a global batch of 128 on.",
        ),
        ({(64, 1): None}, True, "No cell could run: it broke."),
    ],
)
def test_it_names_the_fastest_setting_and_where_more_gpus_pay_or_why_not(speeds, on_gpus, expected):
    assert advice(of_speeds(speeds), on_gpus).endswith(expected)


def test_each_model_gets_its_clause():
    rows = with_speedups([row(64, 1, 1000), row(64, 1, 2000, "mlp")])
    assert advice(rows, True).count(" is fastest at a global batch of 64 on 1 device") == 2


def test_useful_examples_decide_what_learns_fastest():
    """By hand: 1 / (1 + 64 / 64) of 100 and of 180 examples/s help, 1 / (1 + 256 / 64) of 300."""
    rows = with_speedups(
        [
            row(64, 1, 100),
            row(64, 2, 180)._replace(noise_scale=64.0),
            row(256, 2, 300)._replace(noise_scale=64.0),
            row(256, 4, None),
        ]
    )
    assert [r.useful_share for r in rows] == [0.5, 0.5, 0.2, None]
    assert (
        "cnn is fastest at a global batch of 256 on 2 devices (300 examples/s); counting the "
        "examples that help, cnn learns fastest at 64 on 2 devices (50% of 180 examples/s); "
    ) in advice(rows, on_gpus=True)


def test_a_sweep_is_drawn_whatever_cells_are_done(tmp_path):
    speeds = {(64, 1): 1000, (64, 2): 50, (128, 2): 150}
    draw_sweep(tmp_path / "sweep.png", of_speeds(speeds), "cnn on mnist", "a note")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
