"""Compares the weights that several devices compute with the weights that one device computes.

    python -m examples.what_others_get_wrong

It trains a small model in float64 in four cases: batches that divide, an uneven last batch, a
clipped gradient, and gradients that are accumulated over two batches. The reference is a short loop
over global batches without an optimizer (`train_by_hand`). The table shows how much its weights
differ from the weights of Keras' `fit` on one device, of MirroredStrategy and of towers.
"""

import os
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow starts

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import towers  # noqa: E402

DEVICES = 4
GLOBAL_BATCH = 32
LEARNING_RATE = 0.1


class Case(NamedTuple):
    """A way to train.

    examples: number of examples.
    clip: the largest global norm of a gradient, or None.
    accumulate: number of batches of an update, or None for one.
    """

    examples: int
    clip: float | None = None
    accumulate: int | None = None


CASES = {
    "batches that divide: 32, 32, 32": Case(96),
    "an uneven last batch: 32, 32, 32, 5": Case(101),
    "clipping: global_clipnorm=0.1": Case(96, clip=0.1),
    "accumulation: gradient_accumulation_steps=2": Case(128, accumulate=2),
}


def build() -> keras.Model:
    """x [N, 8] -> [N, 1], with the same initial weights each time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)]
    )


def make_examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [N, 8] and y [N, 1]. The first examples have larger values than the last."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 8)) * np.linspace(2.0, 0.2, count)[:, None]
    return x, np.sin(x.sum(axis=1, keepdims=True))


def train_by_hand(case: Case, epochs: int) -> list[np.ndarray]:
    """Returns the weights after a loop that takes each gradient from a global batch at once."""
    model, (x, y) = build(), make_examples(case.examples)
    collected: list[list[tf.Tensor]] = []
    for _ in range(epochs):
        for begin in range(0, case.examples, GLOBAL_BATCH):
            batch = slice(begin, begin + GLOBAL_BATCH)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x[batch]) - y[batch]) ** 2)
            collected.append(tape.gradient(loss, model.trainable_weights))
            if len(collected) < (case.accumulate or 1):
                continue
            gradients = [tf.add_n(parts) / len(collected) for parts in zip(*collected)]
            collected = []
            if case.clip is not None:
                gradients, _ = tf.clip_by_global_norm(gradients, case.clip)
            for weight, gradient in zip(model.trainable_weights, gradients):
                weight.assign_sub(LEARNING_RATE * gradient)
    return model.get_weights()


def fit(model: keras.Model, case: Case, epochs: int) -> list[np.ndarray]:
    """Returns the weights after Keras' `compile` and `fit`."""
    model.compile(
        keras.optimizers.SGD(
            LEARNING_RATE, global_clipnorm=case.clip, gradient_accumulation_steps=case.accumulate
        ),
        "mse",
    )
    x, y = make_examples(case.examples)
    model.fit(x, y, batch_size=GLOBAL_BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def fit_on_one_device(case: Case, epochs: int) -> list[np.ndarray]:
    """Trains with Keras on one device."""
    return fit(build(), case, epochs)


def fit_mirrored(case: Case, epochs: int) -> list[np.ndarray]:
    """Trains with Keras under MirroredStrategy."""
    with tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(DEVICES)]).scope():
        return fit(build(), case, epochs)


def fit_with_towers(case: Case, epochs: int) -> list[np.ndarray]:
    """Trains with make_parallel."""
    return fit(towers.make_parallel(build(), DEVICES), case, epochs)


WAYS = {
    "Keras, 1 device": fit_on_one_device,
    "MirroredStrategy": fit_mirrored,
    "towers": fit_with_towers,
}


def compute_differences(case: Case, epochs: int) -> dict[str, float | Exception]:
    """Returns the largest difference of any weight by the way of training, or its exception."""
    expected = train_by_hand(case, epochs)
    found: dict[str, float | Exception] = {}
    for name, train in WAYS.items():
        try:
            weights = train(case, epochs)
        except Exception as error:
            found[name] = error
        else:
            found[name] = max(float(np.abs(a - b).max()) for a, b in zip(weights, expected))
    return found


def main(epochs: int = 5) -> dict[str, dict[str, float | None]]:
    """Prints and returns the table. An exception is None in the returned table."""
    towers.logical_cpus(DEVICES)
    keras.config.set_floatx("float64")
    print(f"{DEVICES} devices, {epochs} epochs; largest difference from one device's weights")
    print(f"{'':45}" + "".join(f"{name:>18}" for name in WAYS))
    table: dict[str, dict[str, float | None]] = {}
    for name, case in CASES.items():
        found = compute_differences(case, epochs)
        raised = {way: v for way, v in found.items() if isinstance(v, Exception)}
        cells = ("raises" if way in raised else f"{v:.1e}" for way, v in found.items())
        print(f"{name:45}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
        for way, error in raised.items():
            text = " ".join(str(error).replace("\x1b[1m", "").split())  # without Keras' bold type
            print(f"    {way}: {type(error).__name__}: {text[:113]}")
        table[name] = {way: None if way in raised else v for way, v in found.items()}
    return table


if __name__ == "__main__":
    main()
