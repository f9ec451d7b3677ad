"""Shows where a step of `cnn` spends its time: Keras' fit, towers on 1, 2 and 4 devices, PyTorch.

    python benchmarks/bound.py --rounds=3
    python benchmarks/bound.py --torch_python=VENV/bin/python    # and PyTorch, installed there

Prints the medians of milliseconds a step, and of CPU milliseconds a step. Each measurement is a
fresh process. --profile_dir=DIR writes profiles, which TensorBoard's profile page shows.
"""

import collections
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONTENDERS = {"fit": 1, "towers_1": 1, "towers_2": 2, "towers_4": 4, "torch": 1}
BATCH, STEPS, EPOCHS = 128, 30, 4


def measured(train: Any) -> dict[str, float]:
    """Returns milliseconds and CPU milliseconds a step; `train` trains one epoch."""
    train(), train()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(EPOCHS):
        train()
    count = EPOCHS * STEPS / 1000
    return {"ms": (time.perf_counter() - begin) / count, "cpu": (time.process_time() - cpu) / count}


def train_keras(contender: str, profile_dir: str | None) -> dict[str, float]:
    """Measures `fit` of a Keras model or a parallel model; then writes a profile of an epoch."""
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
    if profile_dir is not None:
        with tf.profiler.experimental.Profile(f"{profile_dir}/{contender}"):
            model.fit(data, verbose=0)
    return result


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
        is_torch, profile_dir = contender == "torch", options.get("profile_dir")
        print(json.dumps(train_torch() if is_torch else train_keras(contender, profile_dir)))
        return
    python = {"torch": options.get("torch_python")}
    results = collections.defaultdict(list)
    for _ in range(int(options.get("rounds", 3))):
        for contender in CONTENDERS:
            if command := python.get(contender, sys.executable):
                given = [command, __file__, f"--contender={contender}", *arguments]
                done = subprocess.run(given, text=True, check=True, stdout=subprocess.PIPE)
                results[contender].append(json.loads(done.stdout.splitlines()[-1]))
    for contender, found in results.items():
        step, cpu = (statistics.median(each[name] for each in found) for name in ("ms", "cpu"))
        print(f"{contender:10} {step:6.1f} ms a step {cpu:6.1f} ms of the CPU")


if __name__ == "__main__":
    main(sys.argv[1:])
