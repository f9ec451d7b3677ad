"""Shows where a step of `cnn` spends its time: Keras' fit, towers on 1, 2 and 4 devices, PyTorch.

    python benchmarks/bound.py --rounds=3
    python benchmarks/bound.py --torch_python=VENV/bin/python    # and PyTorch, installed there

Prints the medians of milliseconds a step, CPU milliseconds a step, and the time in oneDNN's kernels
by TensorFlow's profiler, which adds up the threads. Each measurement is a fresh process.
"""

import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTENDERS = {"fit": 1, "towers_1": 1, "towers_2": 2, "towers_4": 4, "torch": 1}
BATCH, STEPS, EPOCHS = 128, 30, 4
GROUPS = {  # the first that a kernel's name contains
    "BackpropFilter": "filter gradients", "BackpropInput": "input gradients",
    "Conv2D": "convolutions", "MatMul": "dense layers", "Pool": "pooling",
}


def measured(train: Any) -> dict[str, float]:
    """Returns milliseconds a step of `train`, which trains an epoch, and those of the CPU."""
    train(), train()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(EPOCHS):
        train()
    count = EPOCHS * STEPS / 1000
    return {"ms": (time.perf_counter() - begin) / count, "cpu": (time.process_time() - cpu) / count}


def train_keras(contender: str) -> dict[str, float]:
    """Measures Keras' fit, or that of a parallel model."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import keras
    import numpy as np
    import tensorflow as tf

    sys.path.insert(0, str(Path(__file__).parents[1]))
    import towers
    from towers.app.models.builtin import cnn

    devices = CONTENDERS[contender]
    if contender != "fit":
        towers.logical_cpus(devices)
    model = cnn((28, 28, 1), 10)
    if contender != "fit":
        model = towers.make_parallel(model, devices)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy")
    x = np.random.rand(BATCH * STEPS, 28, 28, 1).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, np.random.randint(0, 10, len(x))))
    options = tf.data.Options()
    options.autotune.enabled = False  # its waits would count
    data = data.batch(BATCH).prefetch(2).with_options(options)
    result = measured(lambda: model.fit(data, verbose=0))
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        model.fit(data, verbose=0)
        tf.profiler.experimental.stop()
        return result | kernels(Path(folder))


def kernels(folder: Path) -> dict[str, float]:
    """Returns milliseconds a step in oneDNN's kernels, by group, from a profile."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    found: dict[str, float] = collections.defaultdict(float)
    for file in folder.rglob("*.xplane.pb"):
        for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes:
            names = {key: value.name for key, value in plane.event_metadata.items()}
            for event in (event for line in plane.lines for event in line.events):
                name = names[event.metadata_id]
                if "_Mkl" in name:
                    group = next((g for part, g in GROUPS.items() if part in name), "others")
                    found[group] += event.duration_ps / 1e9 / STEPS
    return found


def train_torch() -> dict[str, float]:
    """Measures PyTorch with the same layers, batch and optimizer."""
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, 10),
    ).to(memory_format=torch.channels_last)
    optimizer, loss = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), nn.CrossEntropyLoss()
    x = torch.rand(STEPS, BATCH, 1, 28, 28)
    y = torch.randint(0, 10, (STEPS, BATCH))

    def train() -> None:
        for inputs, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            loss(model(inputs.to(memory_format=torch.channels_last)), labels).backward()
            optimizer.step()

    return measured(train)


def main(arguments: list[str]) -> None:
    """Measures each contender in fresh processes, in turn; prints the table."""
    options = dict(a.removeprefix("--").split("=") for a in arguments)
    if contender := options.get("contender"):
        print(json.dumps(train_torch() if contender == "torch" else train_keras(contender)))
        return
    python = {"torch": options.get("torch_python")}
    results = collections.defaultdict(list)
    for _ in range(int(options.get("rounds", 3))):
        for contender in CONTENDERS:
            if command := python.get(contender, sys.executable):
                done = subprocess.run(
                    [command, __file__, f"--contender={contender}"], text=True, check=True,
                    capture_output=True,
                )
                results[contender].append(json.loads(done.stdout.splitlines()[-1]))
    columns = ["ms", "cpu", *dict.fromkeys([*GROUPS.values(), "others"])]
    print(f"{'':10}" + "".join(f"{name:>18}" for name in columns))
    for contender, found in results.items():
        medians = [statistics.median(each.get(name, 0.0) for each in found) for name in columns]
        print(f"{contender:10}" + "".join(f"{value:18.1f}" for value in medians))


if __name__ == "__main__":
    main(sys.argv[1:])
