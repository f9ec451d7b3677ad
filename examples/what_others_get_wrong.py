"""Compares the weights that several devices compute with the weights that one device computes.

    python -m examples.what_others_get_wrong

It trains a small model in float64 in seven cases, such as an uneven last batch or a contrastive
loss. The reference is a short loop over global batches without an optimizer (`train_by_hand`). The
table shows how much its weights differ from the weights of Keras' `fit` on one device, of
MirroredStrategy and of towers.
"""

import functools
import os
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow starts

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import towers  # noqa: E402

DEVICES = 4
GLOBAL_BATCH = 32
STEPS = 5  # of the longest sequence
LEARNING_RATE = 0.1


def contrastive(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """Compares every example with all others: y [N, 1], z [N, 1] -> loss [N] (InfoNCE)."""
    similarities = -((z - tf.transpose(y)) ** 2)  # [N, N]; the right partner is on the diagonal
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(z)[0]), similarities)


class Case(NamedTuple):
    """A way to train.

    examples: number of examples.
    clip: the largest global norm of a gradient, or None.
    accumulate: number of batches of an update, or None for one.
    layers: the layers before the dense ones.
    loss: "mse" or a function of a batch's labels and outputs.
    masked: whether an example is a sequence of 1 to 5 steps, padded with zeros.
    """

    examples: int = 96
    clip: float | None = None
    accumulate: int | None = None
    layers: tuple[type[keras.layers.Layer], ...] = ()
    loss: Any = "mse"
    masked: bool = False


CASES = {
    "batches that divide: 32, 32, 32": Case(),
    "an uneven last batch: 32, 32, 32, 5": Case(101),
    "BatchNormalization": Case(layers=(keras.layers.BatchNormalization,)),
    "a masked loss: sequences of 1 to 5 steps": Case(layers=(keras.layers.Masking,), masked=True),
    "a contrastive loss": Case(loss=contrastive),
    "clipping: global_clipnorm=0.1": Case(clip=0.1),
    "accumulation: gradient_accumulation_steps=2": Case(128, accumulate=2),
}


def build(case: Case) -> keras.Model:
    """x [N, 8] or [N, 5, 8] -> one value per example or step; the initial weights are the same."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((STEPS, 8) if case.masked else (8,)),
            *(layer() for layer in case.layers),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def make_examples(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Returns x and y. The first examples have larger values, or more steps, than the last."""
    rng = np.random.default_rng(0)
    sizes = np.linspace(2.0, 0.2, case.examples)
    if case.masked:
        x = rng.normal(size=(case.examples, STEPS, 8))
        x *= (np.arange(STEPS) < STEPS * sizes[:, None] / 2)[:, :, None]  # 0 behind the last step
    else:
        x = rng.normal(size=(case.examples, 8)) * sizes[:, None]
    return x, np.sin(x.sum(axis=-1, keepdims=True))


def loss_by_hand(case: Case, x: np.ndarray, y: np.ndarray, outputs: tf.Tensor) -> tf.Tensor:
    """Returns the loss of a global batch: the mean over its examples, or its steps."""
    if case.loss != "mse":
        return tf.reduce_mean(case.loss(tf.constant(y), outputs))
    squares = (outputs - y) ** 2
    return tf.reduce_mean(tf.boolean_mask(squares, x.any(axis=-1)) if case.masked else squares)


def train_by_hand(case: Case, epochs: int) -> list[np.ndarray]:
    """Returns the weights after a loop that takes each gradient from a global batch at once."""
    model, (x, y) = build(case), make_examples(case)
    collected: list[list[tf.Tensor]] = []
    for _ in range(epochs):
        for begin in range(0, case.examples, GLOBAL_BATCH):
            batch = slice(begin, begin + GLOBAL_BATCH)
            with tf.GradientTape() as tape:
                outputs = model(x[batch], training=True)
                loss = loss_by_hand(case, x[batch], y[batch], outputs)
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
        case.loss,
    )
    x, y = make_examples(case)
    model.fit(x, y, batch_size=GLOBAL_BATCH, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def fit_on_one_device(case: Case, epochs: int) -> list[np.ndarray]:
    """Trains with Keras on one device."""
    return fit(build(case), case, epochs)


@functools.cache  # two strategies in one process mix up the keys of their collectives
def mirrored_strategy() -> tf.distribute.Strategy:
    """Returns a MirroredStrategy on all devices."""
    return tf.distribute.MirroredStrategy([f"cpu:{i}" for i in range(DEVICES)])


def fit_mirrored(case: Case, epochs: int) -> list[np.ndarray]:
    """Trains with Keras under MirroredStrategy."""
    with mirrored_strategy().scope():
        return fit(build(case), case, epochs)


def fit_with_towers(case: Case, epochs: int) -> list[np.ndarray]:
    """Trains with make_parallel."""
    return fit(towers.make_parallel(build(case), DEVICES), case, epochs)


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
        table[name] = {way: None if isinstance(v, Exception) else v for way, v in found.items()}
    return table


if __name__ == "__main__":
    main()
