"""Changes the optimizer of a compiled model, and says when its metrics get better."""

import keras

from towers.machine import loss_internals


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
    found = {name: loss_internals.metric_direction(metrics.get(name)) for name in names}
    for name in names:
        if found[name] is None and f"_{name}".endswith("_loss"):
            found[name] = "down"
    return found
