"""train.py as a user calls it: exit codes, error lines, files, signals."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from tests import forked

TRAIN = Path(__file__).parent.parent / "train.py"
FILES = [
    "best.keras", "checkpoints", "config.json", "final.keras", "log.txt", "results.csv",
    "results.png",
]


def environment(**variables):
    """Without what the tests' own process sets for TensorFlow."""
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND", "PYTHONPATH")
    return {**{k: v for k, v in os.environ.items() if k not in hidden}, **variables}


def run_train(*flags, cwd, **variables):
    return subprocess.run(
        [sys.executable, TRAIN, *flags],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def error_of(*flags, cwd, **variables):
    """The one error line of a command that must refuse, leave nothing, and show no traceback."""
    done = run_train(*flags, cwd=cwd, **variables)
    assert (done.returncode, done.stdout, os.listdir(cwd)) == (2, "", [])
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ").rstrip("\n")


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """A run on eight devices, whose directory several tests look at."""
    cwd = tmp_path_factory.mktemp("eight")
    done = run_train("--max_steps=3", "--num_gpus=8", "--batch_size=128", "--device=cpu", cwd=cwd)
    return done, cwd / "runs" / "cnn-mnist-001"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_gpus=0"], "--num_gpus (0) must be a whole number from 1 to 1024."),
        (["--num_gpus=-1"], "--num_gpus (-1) must be a whole number from 1 to 1024."),
        (["--num_gpus=two"], "flag --num_gpus=two: invalid literal for int()"),
        (["--num_gpu=2"], "Unknown command line flag 'num_gpu'. Did you mean: num_gpus ?"),
        (["--batch_size=0"], "--batch_size (0) must be a whole number from 1 to "),
        (["--batch_size=8", "--batch_size_per_gpu=8"], "give only one of them"),
        (["--learning_rate=-1"], "--learning_rate (-1.0) must be a number above 0"),
        (["--learning_rate=nan"], "--learning_rate (nan) must be a number above 0"),
        (["--num_towers=many"], "flag --num_towers=many: invalid literal for int()"),
        (["--predict=x.keras"], "--predict (x.keras) needs --out, a new file"),
        (["--evaluate=x.keras", "--resume=run"], "--evaluate and --resume: give only one of them."),
        (["--evaluate=x.keras"], "--evaluate (x.keras) is neither a .keras file nor the directory"),
        (["--strategy=async"], "older parameters are another computation. `python -m experiments."),
        (["--device=tpu"], "flag --device=tpu: value should be one of <auto|gpu|cpu>"),
        (["8"], "'8' is not a flag."),
        (["--plan", "true"], "'true' is not a flag."),
        (["--flagfile=missing.flags"], "missing.flags"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, message, tmp_path):
    assert message in error_of(*flags, cwd=tmp_path)


def test_another_keras_backend_is_one_line_that_says_how_to_set_it(tmp_path):
    message = error_of(cwd=tmp_path, KERAS_BACKEND="jax")
    assert message.endswith("Set it with: export KERAS_BACKEND=tensorflow")


@pytest.mark.matrix
def test_an_error_after_tensorflow_has_started_is_one_line_too(tmp_path):
    message = error_of("--device=gpu", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert message.startswith("--device=gpu: TensorFlow sees no GPU on this machine.")


@pytest.mark.matrix
def test_logical_gpus_without_a_gpu_are_refused(tmp_path):
    message = error_of("--logical_gpus=8", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert message.startswith("--logical_gpus (8): TensorFlow sees no GPU on this machine. Leave")


@pytest.mark.matrix
def test_gradients_that_differ_end_the_run_before_it_begins(tmp_path):
    done = run_train(
        "--model=tests.app.diagnosis.verify_test:centring",
        "--dataset=tests.app.diagnosis.verify_test:data",
        "--num_towers=3", "--verify_gradients", cwd=tmp_path,
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "Each tower has only its own rows" in done.stdout
    assert done.stderr.startswith("error: --verify_gradients has found")
    assert "gives each row a value that is made of all rows" in done.stderr
    assert done.stderr.endswith(" --verify_gradients=warn trains all the same.\n")


def test_verbosity_1_shows_the_traceback(tmp_path):
    done = run_train("--num_gpus=0", "--verbosity=1", cwd=tmp_path)
    assert done.stderr.startswith("Traceback ")
    assert done.stderr.endswith("\nerror: --num_gpus (0) must be a whole number from 1 to 1024.\n")
    assert done.returncode == 2


def test_help_lists_the_flags_and_is_no_error(tmp_path):
    done = run_train("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python train.py --num_gpus=8 --batch_size=128" in done.stdout
    for flag in ("batch_size: Global batch", "num_towers: ", "[no]verify_gradients: "):
        assert f"\n  --{flag}" in done.stdout


def test_a_short_run_ends_well_with_all_its_files_and_a_quiet_terminal(eight):
    done, directory = eight
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(directory)) == FILES
    assert done.stdout.splitlines()[3:6] == [
        "Batch     128 global = 8 towers x 16; 469 steps an epoch (last: 96 = 8 x 12)",
        "Data      mnist: 60,000 train, 10,000 test",
        "Model     cnn, 1,199,882 parameters; adam, learning rate 0.001; seed 0",
    ]
    assert done.stdout.splitlines()[-1].startswith("Done: 3 steps in ")


def test_the_log_holds_the_output_and_tensorflows_messages(eight):
    done, directory = eight
    log = (directory / "log.txt").read_text().splitlines()
    assert set(done.stdout.splitlines()) <= set(log)
    assert any("oneDNN" in line or "cpu_feature_guard" in line for line in log)


def test_the_results_have_the_one_row_of_a_run_that_ended_in_mid_epoch(eight):
    with open(eight[1] / "results.csv", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert row["epoch"] == "1"
    assert 0 < float(row["val_accuracy"]) < 1 and float(row["examples_per_second"]) > 0


@pytest.mark.matrix
def test_the_final_model_loads_without_towers(eight, tmp_path):
    code = (
        "import sys; sys.modules['towers'] = None; import keras; "
        f"print(keras.saving.load_model({str(eight[1] / 'final.keras')!r}).count_params())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "1199882\n"


@pytest.mark.matrix
def test_a_trained_model_is_evaluated_on_the_data_of_its_run(eight, tmp_path):
    done = run_train(f"--evaluate={eight[1]}", "--num_gpus=2", "--device=cpu", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    with open(eight[1] / "results.csv", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"Evaluate  loss {float(row['val_loss']):.4f}  accuracy ")
    assert " | 10,000 examples in " in last and os.listdir(tmp_path) == []


@pytest.mark.matrix
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_fewer_devices_give_the_same_bits(num_gpus, eight, tmp_path):
    flags = ["--max_steps=3", "--num_towers=8", f"--num_gpus={num_gpus}", "--device=cpu"]
    done = forked.run(TRAIN, *flags, "--run_dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    few = keras.saving.load_model(tmp_path / "run" / "final.keras")
    many = keras.saving.load_model(eight[1] / "final.keras")
    assert len(few.weights) == 8
    for a, b in zip(few.weights, many.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_stops_the_run_with_its_exit_code(number, code, name, tmp_path):
    process = subprocess.Popen(
        [sys.executable, TRAIN, "--dataset=synthetic", "--model=mlp", "--batch_size=4096",
         "--epochs=1000", "--run_dir=run"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    results = tmp_path / "run" / "results.csv"
    deadline = time.monotonic() + 200
    while not results.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=100)
    assert (process.returncode, stderr) == (code, f"stopped by {name}\n")
    assert stdout.splitlines()[-1].startswith("saved at step ")
    assert stdout.endswith(". Resume: python train.py --resume=run\n")


USERS = """
import keras

def build(input_shape, num_classes):
    raise ValueError("no \\x1b[1mmodel\\x1b[0m today")  # as Keras colors its own

class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        int("one")

def callbacks():
    return [Fails()]
"""


@pytest.mark.matrix
@pytest.mark.parametrize("flag, line, traceback", [
    ("--model=users:build", "users.py:5: no model today", "is shown with --verbosity=1"),
    ("--callbacks=users:callbacks", "users.py:9: invalid literal for int() with base 10: 'one'",
     "stands in runs/cnn-mnist-001/log.txt"),
])
def test_a_value_error_of_the_users_code_names_its_line(flag, line, traceback, tmp_path):
    (tmp_path / "users.py").write_text(USERS)
    done = run_train(flag, "--max_steps=2", "--num_gpus=2", "--device=cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {line}. The whole traceback {traceback}.\n"
    for log in tmp_path.glob("runs/*/log.txt"):
        assert "in on_train_batch_end\n    int(\"one\")" in log.read_text()


MIXES = """
import keras

class Mixes(keras.layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)

def model(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape), Mixes(), keras.layers.Flatten(), keras.layers.Dense(num_classes),
    ])
"""


@pytest.mark.matrix
def test_what_towers_warn_of_stands_on_the_terminal(tmp_path):
    (tmp_path / "users.py").write_text(MIXES)
    done = run_train(
        "--model=users:model", "--max_steps=1", "--num_gpus=2", "--device=cpu", cwd=tmp_path
    )
    warned = [line for line in done.stdout.splitlines() if line.startswith("Warning")]
    assert any("(mixes) computes across the rows of a batch" in line for line in warned)
