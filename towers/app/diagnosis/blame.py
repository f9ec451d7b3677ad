"""Finds the layer that makes the averaged gradient differ from the full-batch gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import keras
import tensorflow as tf

from towers.machine.keras_internals import all_layers
from towers.step.losses import ModelLoss
from towers.step.structures import Structure, map_tensors
from towers.step.trials import first_across_rows

_NUM_ROWS = 5  # of a trial
_GATHER = "towers.gather(rows) there, with towers.make_parallel(model, gpus)"


def blamed_layer(model: keras.Model, x: Structure) -> str | None:
    """The first layer that computes across rows, and the way out; None where none is found.

    Args:
        model: built; nothing of it changes.
        x: a batch's inputs.
    """
    layer = None
    with suppress(Exception), tf.device("/cpu:0"):  # as above; a batch may have too few rows
        layer = first_across_rows(model, map_tensors(lambda part: part[:_NUM_ROWS], x))
    if layer is None:
        return None
    return (
        f"layer {layer!r} computes across the rows of a batch, and a tower knows only those of its "
        f"shard. Use {_GATHER}"
    )


def suspected(model: keras.Model, loss: Any, x: Structure) -> str:
    """A sentence on other causes, where no output's loss and no layer is one; and the way out.

    Args:
        model: built; nothing of it changes.
        loss: as `TowerStep` takes it.
        x: a batch's inputs.
    """
    if isinstance(loss, ModelLoss):
        return (
            f"{type(model).__name__}.compute_loss may be no mean over rows. Make it one, or use "
            f"{_GATHER}"
        )
    names: list[str] = []
    with suppress(Exception):
        names = _layers_that_add_losses(model, x)
    if names:
        return (
            f"the loss that layer {' or '.join(map(repr, names))} adds may be no mean over rows. "
            f"Make it one, or use {_GATHER}"
        )
    return (
        "which loss or layer it is cannot be told. Look for what computes across the rows of a "
        "batch and use towers.gather(rows) there, with towers.make_parallel(model, gpus)"
    )


def _called(model: keras.Model, x: Structure) -> Structure:
    """The model's outputs in inference mode, which change none of its variables."""
    state = [(v, tf.convert_to_tensor(v.value)) for v in model.non_trainable_variables]
    with keras.StatelessScope(state_mapping=state):
        return model(x, training=False)


def _layers_that_add_losses(model: keras.Model, x: Structure) -> list[str]:
    names: list[str] = []
    with _told_of_losses(all_layers(model), names.append):
        _called(model, x)
    return list(dict.fromkeys(names))


@contextmanager
def _told_of_losses(
    layers: list[keras.layers.Layer], tell: Callable[[str], None]
) -> Iterator[None]:
    """Within, each layer that adds a loss is told of, by its name, in place of adding it."""
    for layer in layers:
        vars(layer)["add_loss"] = lambda loss, name=layer.name: tell(name)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["add_loss"]
