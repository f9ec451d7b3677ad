"""Shows where a step of `cnn` spends its time: Keras' `fit`, towers on 1 to 4 devices, PyTorch.

    python benchmarks/bound.py --rounds=3
    python benchmarks/bound.py --torch_python=VENV/bin/python    # also PyTorch, which VENV contains

Prints the median milliseconds and CPU milliseconds per step. --profile_dir=DIR also writes
profiles for TensorBoard's profile page. VENV needs the packages torch and absl-py.
"""

import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.machine import peak_memory_mb

BATCH_SIZE, STEPS, WARM_UP_EPOCHS, EPOCHS = 128, 30, 2, 4

_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each contender.", lower_bound=1)
_TORCH_PYTHON = flags.DEFINE_string("torch_python", None, "A Python interpreter with PyTorch.")
_PROFILE_DIR = flags.DEFINE_string("profile_dir", None, "Directory to write profiles to.")
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def train_torch() -> dict[str, Any]:
    """Trains the layers of `cnn` in PyTorch with the same batch and optimizer."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    ).to(memory_format=torch.channels_last)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), nn.CrossEntropyLoss()
    x = torch.rand(STEPS, BATCH_SIZE, 1, 28, 28)
    y = torch.randint(0, 10, (STEPS, BATCH_SIZE))
    for epoch in range(WARM_UP_EPOCHS + EPOCHS):
        if epoch == WARM_UP_EPOCHS:
            start, cpu_start = time.perf_counter(), time.process_time()
        for inputs, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            loss(model(inputs.to(memory_format=torch.channels_last)), labels).backward()
            optimizer.step()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {
        "ms_per_step": 1e3 * seconds / (EPOCHS * STEPS),
        "cpu_ms_per_step": 1e3 * cpu_seconds / (EPOCHS * STEPS),
        "peak_memory_mb": peak_memory_mb(),
        "device": "CPU",
    }


def main(argv: list[str]) -> None:
    """Measures each contender in turn, prints the tables and appends to the CSV."""
    del argv
    contenders: dict[str, dict[str, Any]] = {}
    for name, num_devices in (("fit", 1), ("towers_1", 1), ("towers_2", 2), ("towers_4", 4)):
        contenders[name] = {
            "contender": "fit" if name == "fit" else "parallel",
            "workload": "cnn",
            "data": "dataset",
            "num_devices": num_devices,
            "metrics": [],
            "num_batches": STEPS,
            "warm_up_epochs": WARM_UP_EPOCHS,
            "epochs": EPOCHS,
            "autotune": False,  # its waits would count
            "profile_dir": _PROFILE_DIR.value and f"{_PROFILE_DIR.value}/{name}",
        }
    if _TORCH_PYTHON.value:
        contenders["torch"] = {"function": "bound.train_torch", "python": _TORCH_PYTHON.value}
    results = rounds.run_rounds("epochs.measure", contenders, _ROUNDS.value)
    for measure in ("ms_per_step", "cpu_ms_per_step"):
        rows = rounds.compare(results, "fit", measure, workload="cnn", num_devices=1)
        rounds.append_csv(_OUT.value, rows)
        print(f"{measure}\n{rounds.table(rows)}")


if __name__ == "__main__":
    app.run(main)
