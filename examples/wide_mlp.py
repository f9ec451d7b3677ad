"""A multilayer perceptron with 41 million parameters: many parameters, little computation.

    python -m examples.wide_mlp

Trains on random rows, made batch by batch: 131,072 with a GPU, 4,096 on a CPU. The labels are coin
tosses, so the loss begins near ln 2 = 0.69, and what remains to see is the speed.

`train.py` takes the same hidden layers:

    python train.py --model=examples.wide_mlp:build_softmax --dataset=synthetic
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers

GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without a GPU: logical CPU devices
INPUTS, WIDTHS = 8000, (4000, 2000, 500, 300)
ROWS = 131_072 if GPUS else 4_096
GLOBAL_BATCH = 1024 if GPUS else 512
EPOCHS = 2

INPUT_SHAPE, NUM_CLASSES, OPTIMIZER = (INPUTS,), 2, "adam"  # what train.py reads here


class RandomRows(keras.utils.PyDataset):
    """Rows that every epoch repeats, never all in memory: x float32 [B, inputs], y [B, 1]."""

    def __init__(self, rows: int, inputs: int, **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.inputs = rows, inputs

    def __len__(self) -> int:
        return -(-self.rows // GLOBAL_BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        rows = min(GLOBAL_BATCH, self.rows - index * GLOBAL_BATCH)
        x = rng.random((rows, self.inputs), dtype=np.float32)
        return x, rng.integers(0, 2, (rows, 1)).astype(np.float32)


def build(inputs: int = INPUTS, widths: Sequence[int] = WIDTHS) -> keras.Model:
    """8000-4000-2000-500-300-1, tanh: 41,157,101 parameters."""
    return keras.Sequential([
        keras.Input((inputs,)),
        *(keras.layers.Dense(width, activation="tanh") for width in widths),
        keras.layers.Dense(1, activation="sigmoid"),
    ])


def build_softmax(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """The MLP with a probability for each class: 41,157,402 parameters at (8000,) and 2."""
    return keras.Sequential([
        keras.Input(input_shape),
        *(keras.layers.Dense(width, activation="tanh") for width in WIDTHS),
        keras.layers.Dense(num_classes, activation="softmax"),
    ])


def main(
    rows: int = ROWS, inputs: int = INPUTS, widths: Sequence[int] = WIDTHS, epochs: int = EPOCHS
) -> dict[str, list[float]]:
    """Trains and prints the loss of each epoch; returns `fit`'s history."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        model = build(inputs, widths)
    print(f"{model.count_params():,} parameters, {rows:,} rows, {DEVICES} towers")
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile(keras.optimizers.Adam(1e-4), "binary_crossentropy")
    data = RandomRows(rows, inputs, workers=2, use_multiprocessing=False)
    return parallel.fit(data, epochs=epochs, verbose=2).history


if __name__ == "__main__":
    main()
