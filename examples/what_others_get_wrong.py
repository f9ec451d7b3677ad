"""Compares weights after global batches on several devices with the weights of one device.

    python -m examples.what_others_get_wrong

Trains one small model in float64 four times: in batches that divide, in ragged ones, with the
gradient clipped by its norm, and with gradients accumulated over two batches. The large batch's
weights come from a loop of a few lines, without any optimizer: `large_batch`. Prints the largest
difference from them of Keras' fit on one device, under MirroredStrategy, and on towers.
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
    """examples: N. clip: the largest global norm. accumulate: batches of one update."""

    examples: int
    clip: float | None = None
    accumulate: int | None = None


CASES = {
    "batches that divide: 32, 32, 32": Case(96),
    "ragged batches: 32, 32, 32, 5": Case(101),
    "clipping: global_clipnorm=0.1": Case(96, clip=0.1),
    "accumulation: gradient_accumulation_steps=2": Case(128, accumulate=2),
}


def build() -> keras.Model:
    """8 numbers -> 1; the same weights each time."""
    keras.utils.set_random_seed(0)
    return keras.Sequential([
        keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)
    ])


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    """x [N, 8], y [N, 1]; the first rows are larger than the last."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 8)) * np.linspace(2.0, 0.2, count)[:, None]
    return x, np.sin(x.sum(axis=1, keepdims=True))


def large_batch(case: Case, epochs: int) -> list[np.ndarray]:
    """The weights, each gradient taken from a whole global batch at once."""
    model, (x, y) = build(), rows(case.examples)
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


def fitted(model: keras.Model, case: Case, epochs: int) -> list[np.ndarray]:
    """The weights after Keras' compile and fit."""
    model.compile(
        keras.optimizers.SGD(
            LEARNING_RATE, global_clipnorm=case.clip, gradient_accumulation_steps=case.accumulate
        ),
        "mse",
    )
    x, y = rows(case.examples)
    model.fit(x, y, batch_size=GLOBAL_BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def on_one_device(case: Case, epochs: int) -> list[np.ndarray]:
    """Keras alone."""
    return fitted(build(), case, epochs)


def mirrored(case: Case, epochs: int) -> list[np.ndarray]:
    """Keras under MirroredStrategy."""
    with tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(DEVICES)]).scope():
        return fitted(build(), case, epochs)


def on_towers(case: Case, epochs: int) -> list[np.ndarray]:
    """Keras with make_parallel."""
    return fitted(towers.make_parallel(build(), DEVICES), case, epochs)


WAYS = {"Keras, 1 device": on_one_device, "MirroredStrategy": mirrored, "towers": on_towers}


def differences(case: Case, epochs: int) -> dict[str, float | Exception]:
    """The largest of any weight, for each way of training; or what was raised instead."""
    expected = large_batch(case, epochs)
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
    """Prints the table; returns it, None where an exception was raised."""
    towers.logical_cpus(DEVICES)
    keras.config.set_floatx("float64")
    print(f"{DEVICES} devices, {epochs} epochs; largest difference from one device's weights")
    print(f"{'':45}" + "".join(f"{name:>18}" for name in WAYS))
    table: dict[str, dict[str, float | None]] = {}
    for name, case in CASES.items():
        found = differences(case, epochs)
        raised = {way: v for way, v in found.items() if isinstance(v, Exception)}
        cells = ("raises" if way in raised else f"{v:.1e}" for way, v in found.items())
        print(f"{name:45}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
        for way, error in raised.items():
            words = " ".join(str(error).replace("\x1b[1m", "").split())  # Keras writes in bold
            print(f"    {way}: {type(error).__name__}: {words[:113]}")
        table[name] = {way: None if way in raised else v for way, v in found.items()}
    return table


if __name__ == "__main__":
    main()
