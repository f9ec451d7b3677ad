"""Trains a recurrent network that continues melodies: 49 notes in, the next note out.

    python -m examples.melodies

With 9,000 melodies, the test accuracy is about 0.30 after 2 epochs. The notes are integers. Their
one-hot encoding is 128 times as large, so a layer of the model makes it, on the towers' devices.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

import towers
from towers.datasets import music

GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
LAYER, UNITS = keras.layers.GRU, 256  # or keras.layers.LSTM
EXAMPLES = 18_571 if GPUS else 9_000  # there are 18,571
GLOBAL_BATCH = 256
EPOCHS = 2


def build(layer: Callable = LAYER, units: int = UNITS) -> keras.Model:
    """int32 [N, 49] -> probabilities of the next note, float32 [N, 128]."""
    return keras.Sequential(
        [
            keras.Input((music.NUM_STEPS,), dtype="int32"),
            keras.layers.CategoryEncoding(music.NUM_CLASSES, output_mode="one_hot"),
            layer(units, return_sequences=True),
            layer(units),
            keras.layers.Dense(music.NUM_CLASSES, activation="softmax"),
        ]
    )


def main(
    examples: int = EXAMPLES, epochs: int = EPOCHS, layer: Callable = LAYER, units: int = UNITS
) -> dict[str, list[float]]:
    """Trains, evaluates and continues one melody; returns the history of `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    data = music.load()
    (x, y), test = ([part[:examples] for part in split] for split in (data.train, data.test))
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        model = build(layer, units)
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile("rmsprop", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = parallel.fit(
        x, y, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=2, validation_data=tuple(test)
    ).history
    melody = test[0][:1]
    next_note = int(parallel.predict(melody, verbose=0).argmax())
    print(f"after {melody[0, -8:].tolist()}: predicted {next_note}, actual {test[1][0]}")
    return history


if __name__ == "__main__":
    main()
