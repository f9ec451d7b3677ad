"""Small runs with all that a checkpoint must hold, in processes that tests kill and resume."""

import csv
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

from tests.processes import Forked

ROOT = Path(__file__).parent.parent
_RUN = (
    "--num_gpus=2",
    "--num_towers=4",
    "--batch_size=16",
    "--epochs=2",
    "--device=cpu",
    "--run_dir=run",
)
FLAGS = ("--model=tests.resuming:model", "--dataset=tests.resuming:data", *_RUN)
NOTEBOOK = (
    "--model=notebook_cnn",
    "--dataset=tests.resuming:digits",
    "--optimizer=ScheduledAdam",
    *_RUN,
)
_TENSORFLOWS = re.compile(r"[IWE]0000 |WARNING: All log messages before|To enable the following")
RESUME = ("--resume=run", "--trust_run_dir")  # trust, because the run names modules of tests
STEPS = 8  # of either: two epochs of 50 = 3 x 16 + 2


def model(input_shape, num_classes):
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Conv2D(4, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(num_classes, activation="softmax"),
        ]
    )


def faulty_model(input_shape, num_classes):
    """`model`, whose run meets the environment's FAULT at each step, see `start`."""
    meet_at_each_step(os.environ.get("FAULT", ""))
    return model(input_shape, num_classes)


def data():
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 70)
    x = generator.normal(size=(70, 6, 6, 1)).astype("float32") + y[:, None, None, None]
    return (x[:50], y[:50]), (x[50:], y[50:])


def other_model(input_shape, num_classes):
    return keras.Sequential(
        [keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )


def other_data():
    (x, y), test = data()
    return (x + 1, y), test


def digits():
    """70 distinct digits of MNIST, at half their size."""
    from towers.app import datasets

    x, y = datasets.load("mnist", None, input_shape=(28, 28, 1), num_classes=10).test
    x, y = x[:70, ::2, ::2], y[:70]
    return (x[:50], y[:50]), (x[50:], y[50:])


@keras.saving.register_keras_serializable("tests")
class ScheduledAdam(keras.optimizers.Adam):
    """Adam with a rate that the optimizer itself changes after each update."""

    def __init__(self, learning_rate=None, **arguments):
        schedule = keras.optimizers.schedules.CosineDecay(3e-3, STEPS)
        super().__init__(schedule if learning_rate is None else learning_rate, **arguments)


def start(*flags, cwd, fault="", inside=()):
    """train.py with these flags, in a process of its own.

    fault: a Python expression, evaluated at each step. It sees `step`, the updates that are done;
        `kill(name)` sends the process a signal, `hold(path)` makes PATH-PID and waits for PATH.
    inside: a command that runs the command given behind it.
    """
    command = [*inside, sys.executable, "-m", "tests.resuming", fault, *flags]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(),
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def forked(*flags, cwd, fault=""):
    """`start` of a process that has imported TensorFlow already."""
    return Forked(["-m", "tests.resuming", fault, *flags], cwd, environment())


def environment(**variables):
    """Without what the tests' own process sets for TensorFlow."""
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, **variables}


def train(*flags, cwd, fault="", inside=(), anew=False):
    """(exit code, stdout, stderr) of a process that has ended; takes what `start` takes.

    Without what TensorFlow says on stderr: this module imports Keras before train.py is quiet.
    anew: the process is not forked: it has all that TensorFlow says, in its log.
    """
    if inside or anew:
        process = start(*flags, cwd=cwd, fault=fault, inside=inside)
    else:
        process = forked(*flags, cwd=cwd, fault=fault)
    stdout, stderr = process.communicate(timeout=500)
    lines = [line for line in stderr.splitlines(True) if not _TENSORFLOWS.match(line)]
    return process.returncode, stdout, "".join(lines)


@functools.cache
def uninterrupted(*flags):
    """The outcome of a run that nobody has interrupted; computed once for all tests."""
    with tempfile.TemporaryDirectory() as cwd:
        code, stdout, stderr = train(*flags, cwd=cwd)
        assert code == 0, stdout + stderr
        return outcome(Path(cwd) / "run")


def resumed(cwd, *flags):
    """The outcome of a run that is resumed for the last time."""
    code, stdout, stderr = train(*RESUME, *flags, cwd=cwd)
    assert code == 0, stdout + stderr
    return outcome(cwd / "run")


def outcome(directory):
    """All that must not depend on how often a run was interrupted.

    Weights, seeds, optimizer, sums and train_states come from the last checkpoint; the final model
    and the rows of results.csv, timing aside, from their files.
    """
    from towers.resume import checkpoints

    path, (state, arrays), wrong = checkpoints.read_newest(directory / "checkpoints")
    train_state = {k: v for k, v in state["position"].items() if k != "results"}
    with open(directory / "results.csv", encoding="utf-8") as file:
        rows = [{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)]
    final = keras.saving.load_model(directory / "final.keras")
    values = [v.numpy().tobytes() for v in [*final.weights, *final.optimizer.variables]]
    return {
        "name": path.name,
        "wrong": wrong,
        "position": train_state,
        "rows": rows,
        "final": values,
        "arrays": {k.split("/", 2)[1] + k[:3]: v.tobytes() for k, v in arrays.items()},
    }


def meet_at_each_step(fault):
    """From now on this process evaluates an expression at each step; see `start`."""
    from towers.resume import train_state

    def kill(name):
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))

    def hold(path):
        Path(f"{path}-{os.getpid()}").touch()
        while not Path(path).exists():
            time.sleep(0.01)

    names = {"kill": kill, "hold": hold, "os": os}
    add_step = train_state.TrainState.add_step

    def add_step_and_fail(self, logs):
        add_step(self, logs)
        eval(fault or "None", {"step": self.step, **names})  # the tests' own text

    train_state.TrainState.add_step = add_step_and_fail


def _main(fault, argv):
    """Runs train.py's main, with a fault at each step."""
    from towers.app import __main__ as command
    from towers.app.reporting import charts

    charts.draw_curves = lambda path, results, *_: results and path.touch()  # they take 0.3 s
    meet_at_each_step(fault)
    keras.optimizers.ScheduledAdam = ScheduledAdam  # where --optimizer looks for it
    return command.main(["train.py", *argv])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
