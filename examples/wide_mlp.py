"""A multilayer perceptron with 41 million parameters: many parameters, little computation.

    python -m examples.wide_mlp

Trains on random rows, made batch by batch: 131,072 with a GPU, 4,096 on a CPU. The labels are coin
tosses, so the loss begins near ln 2 = 0.69, and what remains to see is the speed.

`train.py` takes the same hidden layers:

    python train.py --model=examples.wide_mlp:build_softmax --dataset=synthetic
"""

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
    """The same rows in every epoch, never all in memory: x float32 [B, INPUTS], y [B, 1]."""

    def __len__(self) -> int:
        return -(-ROWS // GLOBAL_BATCH)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(index)
        rows = min(GLOBAL_BATCH, ROWS - index * GLOBAL_BATCH)
        x = rng.random((rows, INPUTS), dtype=np.float32)
        return x, rng.integers(0, 2, (rows, 1)).astype(np.float32)


def build() -> keras.Model:
    """8000-4000-2000-500-300-1, tanh: 41,157,101 parameters."""
    return keras.Sequential([
        keras.Input((INPUTS,)),
        *(keras.layers.Dense(width, activation="tanh") for width in WIDTHS),
        keras.layers.Dense(1, activation="sigmoid"),
    ])


def build_softmax(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """The same with a probability for each class: 41,157,402 parameters at (8000,) and 2."""
    return keras.Sequential([
        keras.Input(input_shape),
        *(keras.layers.Dense(width, activation="tanh") for width in WIDTHS),
        keras.layers.Dense(num_classes, activation="softmax"),
    ])


def main() -> None:
    """Trains and prints the loss of each epoch."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        model = build()
    print(f"{model.count_params():,} parameters, {ROWS:,} rows, {DEVICES} towers")
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile(keras.optimizers.Adam(1e-4), "binary_crossentropy")
    parallel.fit(RandomRows(workers=2, use_multiprocessing=False), epochs=EPOCHS, verbose=2)


if __name__ == "__main__":
    main()
