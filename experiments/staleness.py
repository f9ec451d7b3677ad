"""Measures what asynchronous updates cost: towers that update shared parameters without waiting.

    python -m experiments.staleness --towers=1,2,4,8 --out_dir=DIR

Each tower is a thread. It reads the parameters, computes the gradient of a batch, and updates
the parameters, even if other towers have updated them in between. The number of these updates by
others is the staleness of its update. The results are not reproducible, because the order of the
threads differs from run to run. Writes staleness.csv and staleness.png; see experiments/README.md
for the expected results.
"""

import csv
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402  (TensorFlow reads the variable above)
import numpy as np
import tensorflow as tf
from absl import flags

import towers
from towers.app.datasets import mnist

NOTE = "not reproducible: the order of the threads differs from run to run"
LOSS = "sparse_categorical_crossentropy"


class Row(NamedTuple):
    """The results of one number of towers: the columns of staleness.csv."""

    towers: int
    updates: int
    staleness_mean: float
    staleness_max: int
    accuracy: float
    examples_per_second: float


class Updates:
    """Counts the updates of all threads.

    staleness: the staleness of each completed update.
    errors: the exceptions of threads.
    """

    def __init__(self, count: int) -> None:
        """Args: count: number of updates of all threads together."""
        self._indices = iter(range(count))
        self._lock = threading.Lock()
        self.staleness: list[int] = []
        self.errors: list[BaseException] = []

    def start_each(self) -> Iterator[tuple[int, int]]:
        """Yields (index of an update, number of updates completed so far) until none is left."""
        while True:
            with self._lock:
                index = next(self._indices, None)
                num_completed = len(self.staleness)
            if index is None or self.errors:
                return
            yield index, num_completed

    def complete(self, num_completed: int) -> None:
        """Records an update that started after `num_completed` others were completed."""
        with self._lock:
            self.staleness.append(len(self.staleness) - num_completed)


def build(input_shape: tuple[int, ...]) -> keras.Model:
    """Builds an MLP with two hidden layers and 235,146 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Flatten(),
            layers.Dense(256, activation="relu"),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def measure(num_towers: int, updates: int, batch_size: int, learning_rate: float, data: Any) -> Row:
    """Trains a new model with asynchronous towers.

    Args:
        num_towers: number of threads, each with its own device.
        updates: number of updates of all towers together.
        batch_size: examples of one update.
        learning_rate: the rate of SGD with momentum 0.9.
        data: ((x_train, y_train), (x_test, y_test)).
    """
    (x, y), (x_test, y_test) = data
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        model = build(x.shape[1:])
        shared = keras.optimizers.SGD(learning_rate, momentum=0.9)
    steps = [
        towers.TowerStep(model, shared, LOSS, metrics=["accuracy"], devices=[device])
        for device in towers.tower_devices(num_towers)
    ]
    before = [variable.numpy() for variable in [*model.variables, *shared.variables]]
    for step in steps:  # one thread traces all steps, before the timing
        step(x[:batch_size], y[:batch_size])
    for variable, value in zip([*model.variables, *shared.variables], before, strict=True):
        variable.assign(value)
    shared_updates = Updates(updates)
    order = np.random.default_rng(0).permutation(np.resize(np.arange(len(x)), updates * batch_size))

    def train(step: towers.TowerStep) -> None:
        try:
            for index, num_completed in shared_updates.start_each():
                rows = order[index * batch_size : (index + 1) * batch_size]
                step(x[rows], y[rows])["loss"].numpy()  # waits for the update
                shared_updates.complete(num_completed)
        except BaseException as error:
            shared_updates.errors.append(error)

    threads = [threading.Thread(target=train, args=(step,)) for step in steps]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    if shared_updates.errors:
        raise shared_updates.errors[0]
    return Row(
        num_towers,
        updates,
        float(np.mean(shared_updates.staleness)),
        max(shared_updates.staleness),
        _accuracy(steps[0], x_test, y_test),
        updates * batch_size / seconds,
    )


def _accuracy(step: towers.TowerStep, x: np.ndarray, y: np.ndarray) -> float:
    step.reset_metrics()
    for begin in range(0, len(x), 1000):
        logs = step.test_batch(x[begin : begin + 1000], y[begin : begin + 1000])
    return float(logs["accuracy"])


def write(rows: Sequence[Row], directory: Path) -> None:
    """Writes staleness.csv and staleness.png."""
    with (directory / "staleness.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        for row in rows:
            writer.writerow([f"{v:.4f}" if isinstance(v, float) else v for v in row])
    _draw(rows, directory / "staleness.png")


def _draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    figure.suptitle(f"Asynchronous towers, {rows[0].updates} updates in total", x=0.01, ha="left")
    figure.supxlabel(NOTE, x=0.01, ha="left", size=9, color="#666666")
    counts = [row.towers for row in rows]
    left, right = figure.subplots(1, 2)
    left.plot(counts, [row.staleness_mean for row in rows], "o-", color="#0072B2", label="mean")
    left.plot(counts, [row.staleness_max for row in rows], "s--", color="#D55E00", label="largest")
    left.set_title("Updates by others, from reading to updating", loc="left", size=11)
    left.legend(frameon=False)
    right.plot(counts, [row.accuracy for row in rows], "o-", color="#009E73")
    right.set_title("Test accuracy after all updates", loc="left", size=11)
    for axes in (left, right):
        axes.set_xlabel("towers")
        axes.set_xticks(counts)
        axes.grid(color="#dddddd")
    figure.savefig(path)


def main(argv: list[str]) -> int:
    """Measures each number of towers and prints its results; returns the exit code."""
    given = flags.FLAGS
    try:
        given(argv)
        counts = _counts(given.towers)
        directory = Path(given.out_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if not tf.config.list_physical_devices("GPU"):
            towers.logical_cpus(max(counts))
        towers.tower_devices(max(counts))  # raises ValueError if the machine has fewer
    except (flags.Error, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    data = mnist.load()
    print(f"Asynchronous updates; {NOTE}.", flush=True)
    rows = []
    for count in counts:
        rows.append(
            measure(
                count, given.updates, given.batch_size, given.learning_rate, (data.train, data.test)
            )
        )
        write(rows, directory)
        print(
            "towers {0}  updates {1}  staleness {2:.2f} (largest {3})  accuracy {4:.3f} | {5:,.0f} "
            "examples/s".format(*rows[-1]),
            flush=True,
        )
    return 0


def _counts(texts: Sequence[str]) -> list[int]:
    """Returns the numbers of towers.

    Raises:
        ValueError: A text is not a number from 1 to 1024.
    """
    if not texts or not all(text.isdecimal() and 0 < int(text) <= 1024 for text in texts):
        raise ValueError(
            f"--towers ({','.join(texts)}) must be numbers from 1 to 1024, such as 1,2,4."
        )
    return [int(text) for text in texts]


def define_flags() -> None:
    """Defines the flags of the experiment."""
    flags.DEFINE_list("towers", ["1", "2", "4", "8"], "Numbers of threads. Each number is one run.")
    flags.DEFINE_string(
        "out_dir", None, "Directory of staleness.csv and staleness.png.", required=True
    )
    flags.DEFINE_integer("updates", 600, "Number of updates of all towers together.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 128, "Examples of an update.", lower_bound=1)
    flags.DEFINE_float(
        "learning_rate", 0.2, "Learning rate of SGD with momentum 0.9.", lower_bound=0
    )


if __name__ == "__main__":
    define_flags()
    sys.exit(main(sys.argv))
