"""Checks models and arguments before tracing, and raises one-line errors."""

from collections.abc import Sequence

import keras

from towers.machine import choices
from towers.machine.keras_internals import all_layers


def check_model(model: keras.Model) -> None:
    """Raises ValueError for a model that towers cannot compute."""
    if not model.built:
        raise ValueError(
            f"model {model.name!r} is not built: its variables do not exist yet. Give it a "
            "keras.Input, or call it on a batch first."
        )
    check_layers(model)


def check_layers(model: keras.Model) -> None:
    """Raises ValueError for a layer that towers cannot compute."""
    for layer in all_layers(model):
        if getattr(layer, "stateful", False) and isinstance(layer, keras.layers.RNN):
            raise ValueError(
                f"layer {layer.name!r} is stateful=True: its state belongs to the rows of one "
                "batch, which towers divide. Use stateful=False."
            )


def check_shared(model: keras.Model, num_towers: int) -> None:
    """Raises ValueError for variables that one tower can train, but several towers cannot."""
    overwritten = [v for v in model.trainable_variables if v.overwrite_with_gradient]
    if num_towers > 1 and overwritten:
        raise ValueError(
            f"variable {overwritten[0].path!r} takes its gradient for its value, as the history of "
            "a float8 layer's largest numbers does, and towers add gradients up. Use one tower, or "
            "mixed_bfloat16 in the place of float8."
        )


def check_batch_norm(batch_norm: str | None) -> None:
    """Raises ValueError for an unknown way to merge BatchNormalization statistics."""
    if batch_norm is not None:
        check_choice("batch_norm", batch_norm, choices.BATCH_NORM)


def check_strategy(strategy: str) -> None:
    """Raises ValueError for an unknown strategy and for asynchronous updates."""
    if strategy == choices.ASYNC:
        raise ValueError(choices.ASYNC_REFUSED)
    check_choice("strategy", strategy, choices.STRATEGIES)


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError if an argument is not one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}.")
