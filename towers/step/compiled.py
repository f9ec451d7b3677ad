"""Reads the optimizer, loss and metrics of a compiled model."""

from typing import Any

import keras

from towers.machine import loss_internals
from towers.step.metrics import overrides

COMPILED = "compiled"  # stands for the value that the model's `compile` got


def missing_of(model: keras.Model, optimizer: Any, loss: Any) -> list[str]:
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


def recompile(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Compiles a compiled model again with another optimizer; keeps its losses and metrics."""
    # A custom `compile` may take other arguments.
    keras.Model.compile(model, optimizer, *loss_internals.compile_arguments(model))


def directions(model: keras.Model, names: list[str]) -> dict[str, str | None]:
    """Returns whether the loss and each metric of a model get better "up" or "down", or None."""
    metrics = {metric.name: metric for metric in model.metrics}
    compiled = loss_internals.compiled_metrics(model)
    if compiled is not None and compiled.built:
        metrics |= dict(zip(compiled.result(), compiled.metrics, strict=True))
    return {
        name: loss_internals.metric_direction(metrics.get(name))
        or ("down" if f"_{name}".endswith("_loss") else None)
        for name in names
    }
