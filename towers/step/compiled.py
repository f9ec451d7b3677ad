"""Reads the optimizer, loss and metrics of a compiled model."""

import keras

from towers.step.metrics import overrides

COMPILED = "compiled"  # stands for the value that the model's `compile` got


def missing_of(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | str, loss: object
) -> list[str]:
    """Returns which of "optimizer" and "loss" are `COMPILED`, that is, come from the model.

    Raises ValueError if the model is not compiled, or has steps that `TowerStep` does not run.
    """
    given = {"optimizer": optimizer, "loss": loss}
    missing = [name for name, v in given.items() if isinstance(v, str) and v == COMPILED]
    if missing and not model.compiled:
        raise ValueError(
            f"TowerStep has no {' and no '.join(missing)}, and model {model.name!r} is not "
            "compiled. Pass them, such as TowerStep(model, 'adam', 'mse'), or call model.compile."
        )
    if missing:
        check_steps(model)
    return missing


def check_steps(model: keras.Model) -> None:
    """Raises ValueError for a model with a custom train_step or test_step."""
    for name in ("train_step", "test_step"):
        if overrides(model, name):
            raise ValueError(
                f"model ({model.name!r}) has a custom {name}, which towers.train and TowerStep do "
                "not run. Use towers.make_parallel(model, gpus=...) and its fit."
            )
