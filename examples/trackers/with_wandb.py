"""Weights & Biases by its own Keras callback: a fit on towers, and a run of towers.train.

Offline, no account is needed.

    pip install wandb
    WANDB_MODE=offline python -m examples.trackers.with_wandb
    wandb sync wandb/offline-run-*    # later, to an account
"""

import wandb
from wandb.integration.keras import WandbMetricsLogger

import towers
from examples.trackers import digits


def main(epochs: int = 3, examples: int = 6000) -> None:
    """Trains twice: two runs of the project "digits"."""
    train, test = digits.load(examples)
    parallel = towers.make_parallel(digits.model(), digits.DEVICES)
    with wandb.init(project="digits", name="fit"):
        parallel.fit(
            *train, batch_size=digits.GLOBAL_BATCH, epochs=epochs, validation_data=test, verbose=2,
            callbacks=[WandbMetricsLogger()],
        )
    config = digits.config(epochs=epochs)
    with wandb.init(project="digits", name="train", config=digits.given(config)):
        towers.train(config, [WandbMetricsLogger()], model=digits.model(), train=train, test=test)


if __name__ == "__main__":
    main()
