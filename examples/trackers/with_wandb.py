"""Logs `fit` and a run of `towers.train` to Weights & Biases, with its own Keras callback.

With WANDB_MODE=offline, no account is needed.

    pip install wandb
    WANDB_MODE=offline python -m examples.trackers.with_wandb
    wandb sync wandb/offline-run-*    # uploads the runs later
"""

import wandb
from wandb.integration.keras import WandbMetricsLogger

import towers
from examples.trackers import digits


def main(epochs: int = 3, examples: int = 6000) -> None:
    """Trains twice, which adds two runs to the project "digits"."""
    train, test = digits.load(examples)
    parallel = towers.make_parallel(digits.make_model(), digits.DEVICES)
    with wandb.init(project="digits", name="fit"):
        parallel.fit(
            *train,
            batch_size=digits.GLOBAL_BATCH,
            epochs=epochs,
            validation_data=test,
            verbose=2,
            callbacks=[WandbMetricsLogger()],
        )
    config = digits.make_config(epochs=epochs)
    with wandb.init(project="digits", name="train", config=digits.changed_fields(config)):
        towers.train(
            config, [WandbMetricsLogger()], model=digits.make_model(), train=train, test=test
        )


if __name__ == "__main__":
    main()
