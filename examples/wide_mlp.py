"""Trains an MLP with 41 million parameters, which needs little computation per parameter.

    python -m examples.wide_mlp

The data and the labels are random and made batch by batch: 131,072 examples with a GPU, 4,096 on a
CPU. So the loss means nothing; the example shows the speed.

train.py can train the same hidden layers:

    python train.py --model=examples.wide_mlp:build_softmax --dataset=synthetic
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers

GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
INPUTS, WIDTHS = 8000, (4000, 2000, 500, 300)
EXAMPLES = 131_072 if GPUS else 4_096
GLOBAL_BATCH = 1024 if GPUS else 512
EPOCHS = 2

INPUT_SHAPE, NUM_CLASSES, OPTIMIZER = (INPUTS,), 2, "adam"  # train.py reads these


class RandomBatches(keras.utils.PyDataset):
    """Random batches, the same in every epoch: x float32 [B, inputs], y float32 [B, 1]."""

    def __init__(self, examples: int, inputs: int, **options: Any) -> None:
        super().__init__(**options)
        self.examples, self.inputs = examples, inputs

    def __len__(self) -> int:
        return -(-self.examples // GLOBAL_BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        size = min(GLOBAL_BATCH, self.examples - index * GLOBAL_BATCH)
        x = rng.random((size, self.inputs), dtype=np.float32)
        return x, rng.integers(0, 2, (size, 1)).astype(np.float32)


def build(inputs: int = INPUTS, widths: Sequence[int] = WIDTHS) -> keras.Model:
    """Builds 8000-4000-2000-500-300-1 with tanh: 41,157,101 parameters."""
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            *(keras.layers.Dense(width, activation="tanh") for width in widths),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def build_softmax(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds the MLP with one output per class: 41,157,402 parameters for (8000,) and 2."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            *(keras.layers.Dense(width, activation="tanh") for width in WIDTHS),
            keras.layers.Dense(num_classes, activation="softmax"),
        ]
    )


def main(
    examples: int = EXAMPLES,
    inputs: int = INPUTS,
    widths: Sequence[int] = WIDTHS,
    epochs: int = EPOCHS,
) -> dict[str, list[float]]:
    """Trains; returns the history of `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        model = build(inputs, widths)
    print(f"{model.count_params():,} parameters, {examples:,} examples, {DEVICES} towers")
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile(keras.optimizers.Adam(1e-4), "binary_crossentropy")
    data = RandomBatches(examples, inputs, workers=2)
    return parallel.fit(data, epochs=epochs, verbose=2).history


if __name__ == "__main__":
    main()
