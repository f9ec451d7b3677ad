"""Compares the gradient noise scale with the critical batch size that training on MNIST shows.

    python -m experiments.batch_size --out_dir=DIR

It trains a small MLP with SGD to a fixed test accuracy, at several batch sizes and learning rates.
At each batch size, the learning rate with the fewest steps counts. With B examples per batch,
McCandlish et al. (arXiv 1812.06162, eq. 2.11) expect S = S_min * (1 + B_crit / B) steps. A fit
gives the critical batch size B_crit, to which the noise scale should be close. Writes
batch_size.csv and batch_size.png.
"""

import csv
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402  (TensorFlow reads the variable above)
import numpy as np
import tensorflow as tf
from absl import flags

import towers
from towers.app.datasets import mnist

TOWERS = 8  # the noise scale compares the gradients of their shards
CHECK_FACTOR = 1.03  # the accuracy is checked again after 3% more steps


class Row(NamedTuple):
    """The results of one batch size: the columns of batch_size.csv."""

    batch_size: int
    learning_rate: float  # the rate with the fewest steps
    steps: float  # steps to the accuracy, mean over the seeds
    examples: float
    noise_scale: float  # in examples: mean(tr(S)) / mean(|G|^2), over all steps


def train(
    data: Any, batch_size: int, rate: float, seed: int, accuracy: float, max_steps: int
) -> tuple[int, float] | None:
    """Returns (steps, noise scale) of a run to `accuracy`; None after `max_steps` steps."""
    (x, y), (x_test, y_test) = data
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = towers.TowerStep(
        model, keras.optimizers.SGD(rate), loss, num_towers=TOWERS, noise_scale=True
    )
    order, next_check, steps = np.random.default_rng(seed), 10.0, 0
    step.reset_metrics()
    while steps < max_steps:
        rows = order.permutation(len(x))
        for begin in range(0, len(x) - batch_size + 1, batch_size):
            chosen = rows[begin : begin + batch_size]
            logs, steps = step.train_batch(x[chosen], y[chosen]), steps + 1
            if steps >= next_check:
                next_check = max(steps + 1, steps * CHECK_FACTOR)
                predicted = np.argmax(model(x_test).numpy(), axis=1)
                if np.mean(predicted == y_test) >= accuracy:
                    return steps, float(logs["noise_scale"])
            if steps >= max_steps:
                break
    return None


def measure(data: Any, batch_size: int, likely_rate: float, given: Any) -> Row:
    """Returns the results of one batch size with its best learning rate.

    It tries the rates near `likely_rate` first, because a good result limits the later runs.
    """
    best: Row | None = None
    rates = map(float, given.learning_rates)
    for rate in sorted(rates, key=lambda rate: abs(np.log2(rate / likely_rate))):
        limit = given.max_steps if best is None else int(1.5 * best.steps)
        runs = [
            train(data, batch_size, rate, seed, given.accuracy, limit)
            for seed in range(given.seeds)
        ]
        if all(runs):
            steps = statistics.mean(run[0] for run in runs if run)
            if best is None or steps < best.steps:
                noise = statistics.mean(run[1] for run in runs if run)
                best = Row(batch_size, rate, steps, steps * batch_size, noise)
    if best is None:
        raise ValueError(
            f"no learning rate reached an accuracy of {given.accuracy} with batches of "
            f"{batch_size}: use a larger --max_steps or a lower --accuracy."
        )
    return best


def critical_batch(rows: list[Row]) -> tuple[float, float]:
    """Fits S = S_min * (1 + B_crit / B) to the logarithms of the steps; returns (S_min, B_crit)."""
    sizes, steps = (np.array([getattr(row, name) for row in rows]) for name in Row._fields[:3:2])
    errors = {}
    for critical in np.geomspace(1, 1e5, 2001):
        ratios = np.log(steps) - np.log1p(critical / sizes)
        errors[critical] = (np.var(ratios), float(np.exp(np.mean(ratios))))
    critical = min(errors, key=lambda value: errors[value][0])
    return errors[critical][1], float(critical)


def draw(rows: list[Row], path: Path) -> None:
    """Draws the steps and the noise scale over the batch size, with the fitted curve."""
    from matplotlib.figure import Figure

    fewest, critical = critical_batch(rows)
    sizes = np.array([row.batch_size for row in rows])
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.loglog(sizes, [row.steps for row in rows], "o", color="#1f4e79", label="steps to accuracy")
    fine = np.geomspace(sizes[0], sizes[-1], 200)
    axes.loglog(
        fine,
        fewest * (1 + critical / fine),
        color="#1f4e79",
        label=f"{fewest:.0f} x (1 + {critical:.0f} / B)",
    )
    axes.loglog(
        sizes,
        [row.noise_scale for row in rows],
        "s",
        color="#c55a11",
        label="noise scale, examples",
    )
    axes.axvline(critical, color="0.6", linewidth=1, linestyle="--", label="critical batch size")
    axes.set_xlabel("batch size B, examples")
    axes.set_ylabel("steps, or examples")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(argv: list[str]) -> int:
    """Runs the experiment; returns the exit code."""
    given = flags.FLAGS
    try:
        given(argv)
        sizes = sorted(map(int, given.batch_sizes))
        directory = Path(given.out_dir)
        directory.mkdir(parents=True, exist_ok=True)
        if not tf.config.list_physical_devices("GPU"):
            towers.logical_cpus(2, num_towers=TOWERS)
        splits = mnist.load()
        data = [(x.reshape(len(x), -1), y) for x, y in (splits.train, splits.test)]
        rows: list[Row] = []
        for batch_size in sizes:
            likely_rate = rows[-1].learning_rate if rows else 0.25
            rows.append(measure(data, batch_size, likely_rate, given))
            print(
                "batch {0}  rate {1:g}  steps {2:.0f}  examples {3:,.0f}  noise scale {4:.0f}".format(
                    *rows[-1]
                ),
                flush=True,
            )
            with (directory / "batch_size.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([Row._fields, *rows])
        fewest, critical = critical_batch(rows)
        print(f"at least {fewest:.0f} steps, critical batch size {critical:.0f}")
        draw(rows, directory / "batch_size.png")
    except (flags.Error, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def define_flags() -> None:
    """Defines the flags of the experiment."""
    flags.DEFINE_list(
        "batch_sizes", ["16", "64", "256", "1024", "4096"], "Numbers of examples in an update."
    )
    flags.DEFINE_list(
        "learning_rates",
        [str(2.0**k) for k in range(-6, 2)],
        "Learning rates of SGD. Default: the powers of 2 from 1/64 to 2.",
    )
    flags.DEFINE_float("accuracy", 0.95, "Test accuracy at which a run ends.")
    flags.DEFINE_integer("seeds", 2, "Runs of each batch size and learning rate.", lower_bound=1)
    flags.DEFINE_integer("max_steps", 20_000, "Steps after which a run stops.", lower_bound=1)
    flags.DEFINE_string("out_dir", None, "Directory of the results.", required=True)


if __name__ == "__main__":
    define_flags()
    sys.exit(main(sys.argv))
