"""Logs `fit` and a run of `towers.train` to TensorBoard, with Keras' own callback.

python -m examples.trackers.with_tensorboard
tensorboard --logdir=logs
"""

from pathlib import Path

import keras

import towers
from examples.trackers import digits


def main(epochs: int = 3, examples: int = 6000, directory: str = "logs") -> dict[str, list[float]]:
    """Trains twice; returns the history of `towers.train`."""
    train, test = digits.load(examples)
    parallel = towers.make_parallel(digits.make_model(), digits.DEVICES)
    parallel.fit(
        *train,
        batch_size=digits.GLOBAL_BATCH,
        epochs=epochs,
        validation_data=test,
        verbose=2,
        callbacks=[keras.callbacks.TensorBoard(Path(directory, "fit"))],
    )
    # tensorboard=True adds another log, with the speed and histograms.
    return towers.train(
        digits.make_config(epochs=epochs, run_dir=str(Path(directory, "run")), tensorboard=True),
        [keras.callbacks.TensorBoard(Path(directory, "train"))],
        model=digits.make_model(),
        train=train,
        test=test,
    )


if __name__ == "__main__":
    main()
