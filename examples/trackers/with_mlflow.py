"""Logs `fit` and a run of `towers.train` to MLflow, with MLflow's own Keras callback.

The logs are in the file mlflow.db of the current directory.

    pip install mlflow
    python -m examples.trackers.with_mlflow
    mlflow ui --backend-store-uri=sqlite:///mlflow.db
"""

import mlflow
from mlflow.keras import MlflowCallback

import towers
from examples.trackers import digits


def main(epochs: int = 3, examples: int = 6000, store: str = "sqlite:///mlflow.db") -> None:
    """Trains twice, which adds two runs to the experiment "digits"."""
    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("digits")
    train, test = digits.load(examples)
    parallel = towers.make_parallel(digits.make_model(), digits.DEVICES)
    with mlflow.start_run(run_name="fit"):
        parallel.fit(
            *train,
            batch_size=digits.GLOBAL_BATCH,
            epochs=epochs,
            validation_data=test,
            verbose=2,
            callbacks=[MlflowCallback()],
        )
    config = digits.make_config(epochs=epochs)
    with mlflow.start_run(run_name="train"):
        mlflow.log_params(digits.changed_fields(config))
        towers.train(config, [MlflowCallback()], model=digits.make_model(), train=train, test=test)


if __name__ == "__main__":
    main()
