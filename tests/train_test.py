"""train.py and sweep.py as a user calls them; what becomes of a run without disk or memory."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.app.run_test import config
from tests.processes import NAMESPACE, READ_ONLY, SMALL_DISK, skip_where_nothing_can_be_mounted
from tests.resuming import FLAGS, environment, outcome, resumed, start, train, uninterrupted
from towers import digest
from towers.app import run_dir
from towers.app.config import TrainConfig
from towers.machine.places import LostDirectoryError
from towers.resume import checkpoints

ROOT = Path(__file__).parent.parent
TRAIN, SWEEP = ROOT / "train.py", ROOT / "sweep.py"
FILES = [
    "best.keras",
    "checkpoints",
    "config.json",
    "final.keras",
    "ledger.csv",
    "log.txt",
    "results.csv",
    "results.png",
]
USERS = """
import keras
import numpy as np

def build(input_shape, num_classes):
    raise ValueError("no \\x1b[1mmodel\\x1b[0m today")  # as Keras colors its own

class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        int("one")

def callbacks():
    return [Fails()]

def model(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape), keras.layers.Flatten(),
        keras.layers.Dense(num_classes, activation="softmax"),
    ])

def data():
    examples = np.arange(300, dtype="float32").reshape(100, 3) / 300, np.arange(100) % 3
    return examples, examples
"""


@pytest.fixture
def users(tmp_path):
    (tmp_path / "users.py").write_text(USERS)


def run(*arguments, cwd, **variables):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )


def rows(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "script, flags, variables, message",
    [
        (TRAIN, "--num_gpus=two", {}, "flag --num_gpus=two: it must be an integer"),
        (TRAIN, "--predict=x.keras", {}, "--predict (x.keras) needs --out, a new file"),
        (TRAIN, "--replay=x --at=2 --out=file.json", {}, "--out (file.json) exists already"),
        (TRAIN, "--evaluate=x --resume=run", {}, "--evaluate and --resume: give only one of them."),
        (TRAIN, "", {"KERAS_BACKEND": "jax"}, "Set it with: export KERAS_BACKEND=tensorflow"),
        (SWEEP, "--batch_size=64", {}, "flag 'batch_size'. Did you mean: batch_sizes"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(script, flags, variables, message, tmp_path):
    (tmp_path / "file.json").touch()
    done = run(script, *flags.split(), cwd=tmp_path, **variables)
    assert (done.returncode, done.stdout, os.listdir(tmp_path)) == (2, "", ["file.json"])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_verbosity_1_shows_the_traceback(tmp_path):
    done = run(TRAIN, "--num_gpus=0", "--verbosity=1", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("Traceback ")
    assert "\nerror: --num_gpus (0) must be " in done.stderr


def test_a_short_run_ends_well_with_all_its_files_and_a_quiet_terminal(users, tmp_path):
    done = run(
        TRAIN,
        "--model=users:model",
        "--dataset=users:data",
        "--max_steps=3",
        "--num_gpus=2",
        "--batch_size=16",
        "--device=cpu",
        cwd=tmp_path,
    )
    directory = tmp_path / "runs/users_model-users_data-001"
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(directory)) == FILES
    lines = done.stdout.splitlines()
    assert lines[3:6] == [
        "Batch     16 global = 2 towers x 8; 7 steps an epoch (last: 4 = 2 x 2)",
        "Data      users:data: 100 train, 100 test",
        "Model     users:model, 12 parameters; adam, learning rate 0.001; seed 0",
    ]
    assert lines[-1].startswith("Done: 3 steps in ")
    log = (directory / "log.txt").read_text().splitlines()
    assert set(lines) <= set(log)
    assert any("oneDNN" in line or "cpu_feature_guard" in line for line in log)  # TensorFlow's
    (row,) = rows(directory / "results.csv")  # of a run that ended in mid-epoch
    assert row["epoch"] == "1"
    assert 0 < float(row["val_accuracy"]) < 1 and float(row["examples_per_second"]) > 0
    model = keras.saving.load_model(directory / "final.keras")
    assert lines[-1].endswith(f"; weights {row['digest']}") and row["digest"] == digest(model)
    done = processes.run(
        TRAIN, f"--evaluate={directory}", "--trust_run_dir", "--epochs=3", cwd=tmp_path
    )
    first, *_, last = done.stdout.splitlines()
    assert first == "Warning   --epochs: no effect, because nothing is trained."
    assert last.startswith(f"Evaluate  loss {float(row['val_loss']):.4f}  accuracy ")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "flag, line, traceback",
    [
        ("--model=users:build", "users.py:6: no model today", "is shown with --verbosity=1"),
        (
            "--callbacks=users:callbacks",
            "users.py:10: invalid literal for int() with base 10: 'one'",
            "stands in run/log.txt",
        ),
    ],
)
def test_a_value_error_of_the_users_code_names_its_line(flag, line, traceback, users, tmp_path):
    flags = ["--dataset=users:data", "--num_gpus=2", "--device=cpu", "--run_dir=run"]
    done = run(TRAIN, "--model=users:model", *flags, flag, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {line}. The whole traceback {traceback}.\n"
    log = tmp_path / "run/log.txt"
    assert log.exists() == ("log.txt" in traceback)
    if log.exists():
        assert 'in on_train_batch_end\n    int("one")' in log.read_text()


def test_a_sweep_writes_a_table_a_picture_and_its_runs(users, tmp_path):
    done = processes.run(
        SWEEP,
        "--models=users:model",
        "--dataset=users:data",
        "--batch_sizes=32",
        "--max_steps=3",
        "--gpu_counts=3",
        "--device=cpu",
        "--out_dir=out",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "out"
    assert sorted(os.listdir(out)) == ["cells", "sweep.csv", "sweep.json", "sweep.png"]
    cell = out / "cells/users_model-batch32-gpus3"
    assert {"config.json", "results.csv", "final.keras", "log.txt"} <= {*os.listdir(cell)}

    (row,) = rows(out / "sweep.csv")
    assert [row[name] for name in ("num_gpus", "per_tower_batch", "num_towers", "epochs")] == [
        "3",
        "11",
        "3",
        "1",
    ]
    (result,) = rows(cell / "results.csv")
    assert {result[n] == row[n] for n in ("accuracy", "val_accuracy", "seconds")} == {True}

    lines = done.stdout.splitlines()
    assert lines[:2] == ["towers 0.1 | sweep: out", "Cells     1, 1 to run"]
    assert lines[2].startswith("1/1  users:model  batch    32 on 3,    11 a tower  ")
    assert lines[3] == "Wrote     out/sweep.csv, out/sweep.png"


SHORT = (*FLAGS, "--max_steps=2")


@pytest.fixture(scope="module")
def mount(tmp_path_factory):
    skip_where_nothing_can_be_mounted(tmp_path_factory.mktemp("mount"))


@pytest.mark.matrix
def test_a_run_trains_to_its_end_when_its_reader_goes_away_and_without_stdout(tmp_path):
    """As in `python train.py | head -1`, and in `python train.py >&-`."""
    (tmp_path / "closed").mkdir()
    process = start(*SHORT, cwd=tmp_path)
    assert process.stdout.readline().startswith("towers ")
    process.stdout.close()
    _, stderr = process.communicate(timeout=500)
    assert process.returncode == 0 and "Error" not in stderr
    closed = ("sh", "-c", 'exec "$@" >&-', "sh")
    code, _, stderr = train(*SHORT, cwd=tmp_path / "closed", inside=closed)
    assert (code, stderr) == (0, "")
    for cwd in (tmp_path, tmp_path / "closed"):
        assert outcome(cwd / "run")["position"]["step"] == 2


@pytest.mark.matrix
def test_a_read_only_directory_is_an_error_before_step_1(mount, tmp_path):
    inside = (*NAMESPACE, READ_ONLY, "sh")
    code, _, stderr = train(*SHORT, cwd=tmp_path, inside=inside, fault="kill('KILL')")
    assert code == 2 and list(tmp_path.iterdir()) == []
    assert stderr.startswith("error: --run_dir (run) cannot be used: Read-only file system: ")
    assert stderr.count("\n") == 1 and "Name a directory that you can write to" in stderr


@pytest.mark.matrix
def test_a_run_survives_a_full_disk_and_resumes_from_an_older_checkpoint(mount, tmp_path):
    """It is full from the fifth step on; when there is room again, the last epoch is repeated."""
    fault = "step == 5 and os.system('cat /dev/zero > filler 2> /dev/null')"
    flags = [*FLAGS, "--checkpoint_every=2"]
    code, stdout, stderr = train(
        *flags, cwd=tmp_path, fault=fault, inside=(*NAMESPACE, SMALL_DISK, "sh")
    )
    assert code == 5 and stderr.startswith("error: run/final.keras cannot be written (No space ")
    assert stderr.endswith("continue the run: python train.py --resume=run --trust_run_dir.\n")
    for path in ("checkpoints/epoch-1-step-6", "results.csv"):
        assert f"run/{path} cannot be written (No space left on device); " in stdout
    path, _, wrong = checkpoints.read_newest(tmp_path / "run/checkpoints")
    assert (path.name, wrong) == ("epoch-1-step-4", [])
    assert resumed(tmp_path) == uninterrupted(*FLAGS)


class Harm(keras.callbacks.Callback):
    """Puts directories in the place of files."""

    def __init__(self, *paths):
        super().__init__()
        self.paths = paths

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            for path in self.paths:
                path.unlink(missing_ok=True)
                path.mkdir()


@pytest.mark.telling("best*")
@pytest.mark.parametrize(
    "name, error, models",
    [
        (
            run_dir.FINAL,
            "run/final.keras cannot be written .*what it held before is intact",
            "final.keras is not written, best.keras holds the weights of epoch 1, the best by loss",
        ),
        (
            run_dir.BEST,
            "run/best.keras does not hold the weights of the best epoch",
            "final.keras holds the weights after 2 epochs",
        ),
    ],
)
def test_a_model_that_is_not_in_its_file_is_an_error_until_a_resume_has_written_it(
    name, error, models, tmp_path, monkeypatch, capsys
):
    """A table, a log and a chart that cannot be written are warnings."""
    monkeypatch.chdir(tmp_path)
    first_is_best = {"monitor": "loss", "monitor_mode": "max"}
    paths = [tmp_path / "run" / n for n in (name, "results.csv", "log.txt", "results.png")]
    with pytest.raises(LostDirectoryError, match=f"{error}. .*--resume=.*run"):
        towers.train(config(run_dir="run", **first_is_best), [Harm(*paths)])
    said = capsys.readouterr().out
    assert f"Models    {models}\nTrained: 2 epochs" in said
    assert all(f"run/{name} cannot be written" in said for name in ("results.csv", "log.txt"))
    assert "Warning   results.png cannot be drawn (IsADirectoryError: " in said
    for path in paths:
        path.rmdir()
    history = towers.train(TrainConfig(resume="run", trust_run_dir=True))
    assert len(history["loss"]) == 2 and "Done: 2 epochs" in capsys.readouterr().out
    for file, iterations in [("best.keras", 4), ("final.keras", 8)]:
        model = keras.saving.load_model(tmp_path / "run" / file)
        assert int(model.optimizer.iterations) == iterations


def greedy_model(input_shape, num_classes):
    """Asks for more than 2^56 bytes an example: more than an address can name."""

    class Greedy(keras.layers.Layer):
        def call(self, x):
            return x + tf.reduce_max(tf.tile(tf.stop_gradient(x), [1, 2**54]))

    return keras.Sequential(
        [keras.Input(input_shape), Greedy(), keras.layers.Dense(num_classes, activation="softmax")]
    )


@pytest.mark.matrix
def test_too_little_memory_names_the_per_tower_batch(tmp_path):
    """TensorFlow waits 10 s for each allocation that fails, in case that memory becomes free.

    On two devices it often reports the cancelled transfer instead; its messages in the log tell.
    """
    code, stdout, stderr = train(
        "--model=tests.train_test:greedy_model",
        "--dataset=tests.app.run_test:small_data",
        "--num_gpus=2",
        "--batch_size=16",
        "--device=cpu",
        "--run_dir=run",
        cwd=tmp_path,
        anew=True,
    )
    assert code == 2, stdout + stderr
    assert "error: a device has too little memory for 8 examples a tower" in stderr
    assert "smaller --batch_size than 16" in stderr and "--num_towers=4" in stderr
    assert [path.name for path in checkpoints.find(tmp_path / "run/checkpoints")] == [
        "epoch-0-step-0"
    ]
