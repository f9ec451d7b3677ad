"""TensorBoard by Keras' own callback: a fit on towers, and a run of towers.train.

    python -m examples.trackers.with_tensorboard
    tensorboard --logdir=logs
"""

from pathlib import Path

import keras

import towers
from examples.trackers import digits


def main(epochs: int = 3, examples: int = 6000, directory: str = "logs") -> dict[str, list[float]]:
    """Trains twice; returns the history of the run of towers.train."""
    train, test = digits.load(examples)
    parallel = towers.make_parallel(digits.model(), digits.DEVICES)
    parallel.fit(
        *train, batch_size=digits.GLOBAL_BATCH, epochs=epochs, validation_data=test, verbose=2,
        callbacks=[keras.callbacks.TensorBoard(Path(directory, "fit"))],
    )
    # The run's own log, with speed and histograms, needs no callback: tensorboard=True.
    return towers.train(
        digits.config(epochs=epochs, run_dir=str(Path(directory, "run")), tensorboard=True),
        [keras.callbacks.TensorBoard(Path(directory, "train"))],
        model=digits.model(), train=train, test=test,
    )


if __name__ == "__main__":
    main()
