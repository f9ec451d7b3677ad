"""A small run with all that a checkpoint must hold, in processes that tests kill and resume."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np

ROOT = Path(__file__).parent.parent
FLAGS = (
    "--model=tests.resuming:model", "--dataset=tests.resuming:data", "--num_gpus=2",
    "--num_towers=4", "--batch_size=16", "--epochs=2", "--device=cpu", "--run_dir=run",
)
STEPS = 8  # two epochs of 50 = 3 x 16 + 2


def model(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.Conv2D(4, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(num_classes, activation="softmax"),
    ])


def data():
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 70)
    x = generator.normal(size=(70, 6, 6, 1)).astype("float32") + y[:, None, None, None]
    return (x[:50], y[:50]), (x[50:], y[50:])


def start(*flags, cwd, fault=""):
    """train.py in a process of its own; `fault` is a Python expression, evaluated at each step.

    It sees `step`, the updates that are done; `kill(number)` sends the process a signal.
    """
    hidden = ("TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.resuming", fault, *flags]
    return subprocess.Popen(
        command, cwd=cwd, env={**environment, "PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )


def train(*flags, cwd, fault=""):
    """(exit code, stdout, stderr) of a process that has ended."""
    process = start(*flags, cwd=cwd, fault=fault)
    stdout, stderr = process.communicate(timeout=300)
    return process.returncode, stdout, stderr


def outcome(directory):
    """All that must not depend on how often a run was interrupted.

    Weights, seeds, optimizer, sums and positions come from the last checkpoint; the final model
    and the rows of results.csv, timing aside, from their files.
    """
    from towers import checkpoints

    path, (state, arrays), wrong = checkpoints.read_newest(directory / "checkpoints")
    position = {k: v for k, v in state["position"].items() if k != "results"}
    with open(directory / "results.csv", encoding="utf-8") as file:
        rows = [
            {k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)
        ]
    final = keras.saving.load_model(directory / "final.keras")
    values = [v.numpy().tobytes() for v in [*final.weights, *final.optimizer.variables]]
    return {
        "name": path.name, "wrong": wrong, "position": position, "rows": rows, "final": values,
        "arrays": {k.split("/", 2)[1] + k[:3]: v.tobytes() for k, v in arrays.items()},
    }


def _main(fault, argv):
    """Runs train.py's main, with a fault at each step."""
    import train as command
    from towers import snapshot

    def kill(number):
        os.kill(os.getpid(), getattr(signal, f"SIG{number}"))

    add_step = snapshot.Position.add_step

    def add_step_and_fail(self, logs):
        add_step(self, logs)
        eval(fault or "None", {"step": self.step, "kill": kill, "os": os})  # the tests' own text

    snapshot.Position.add_step = add_step_and_fail
    return command.main(["train.py", *argv])


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
