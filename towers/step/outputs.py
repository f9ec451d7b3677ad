"""The loss, the factor, the labels and the weights of each output of a model.

A user gives one for all, a list, or a dict by the outputs' names; here they are laid side by side.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.keras_internals import function_loss, keras_mask
from towers.step.structures import Structure

_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")


class OutputLoss(NamedTuple):
    """The loss of one output of the model, and its factor in the total loss."""

    loss: keras.losses.Loss
    factor: float


def resolve_losses(
    loss: Any, loss_weights: Any, outputs: Structure, names: Sequence[str] | None = None
) -> list[OutputLoss | None]:
    """One entry for each output of the model, None for an output without a loss.

    Args:
        loss: a Keras loss, its name, a function (y_true, y_pred), or a list or dict of these; a
            ModelLoss, which is no output's.
        loss_weights: a number, or a list or dict of numbers; None means 1 everywhere.
        outputs: the model's outputs, a structure.
        names: the outputs' names, for a dict of losses beside a list of outputs.

    Raises:
        ValueError: the structures do not match, or a loss has no reduction.
    """
    if isinstance(loss, ModelLoss):
        loss = None
    losses = per_output(loss, outputs, names, "loss", repeat=True)
    factors = per_output(loss_weights, outputs, names, "loss_weights", repeat=True)
    resolved: list[OutputLoss | None] = []
    for identifier, factor in zip(losses, factors, strict=True):
        if identifier is None:
            resolved.append(None)
        else:
            resolved.append(OutputLoss(_loss_object(identifier), 1.0 if factor is None else factor))
    return resolved


def _loss_object(identifier: Any) -> keras.losses.Loss:
    """A Loss from a Keras loss, a name or a function; a function becomes a mean over examples."""
    loss = keras.losses.get(identifier)
    if not isinstance(loss, keras.losses.Loss):
        loss = function_loss(loss)
    if loss_reduction(loss) not in _REDUCTIONS:
        raise ValueError(
            f"loss {loss.name!r} has reduction={loss.reduction!r}; a training loss must be one "
            f"number. Use one of {', '.join(_REDUCTIONS)}."
        )
    return loss


def per_output(
    value: Any, outputs: Structure, names: Sequence[str] | None, what: str, *, repeat: bool = False
) -> list[Any]:
    """Lays `value` out beside the flattened outputs.

    Args:
        value: one value, or a structure: like `outputs`, a flat list, or a dict by output name.
        outputs: the model's outputs.
        names: their names, where the model has any.
        what: the argument's name, for the error.
        repeat: whether one value stands for every output.

    Returns:
        A list as long as `tf.nest.flatten(outputs)`; None where a dict has no entry.

    Raises:
        ValueError: `value` does not match.
    """
    count = len(tf.nest.flatten(outputs))
    if not tf.nest.is_nested(value):
        if count == 1:
            return [value]
        if repeat or value is None:
            return [value] * count
        raise ValueError(f"{what} is one value, but the model has {count} outputs.")
    if isinstance(value, dict):
        keys = sorted(outputs) if isinstance(outputs, dict) else list(names or [])
        unknown = sorted(set(value) - set(keys))
        if unknown or len(keys) != count:
            raise ValueError(f"{what} names {unknown or sorted(value)}; the outputs are {keys}.")
        return [value.get(key) for key in keys]
    flat = tf.nest.flatten(value)
    if len(flat) != count:
        raise ValueError(f"{what} has {len(flat)} entries, but the model has {count} outputs.")
    return flat


def overrides_call(loss: keras.losses.Loss) -> bool:
    """Whether a loss replaces `Loss.__call__` and with it Keras' reduction."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


def is_sum(loss: keras.losses.Loss) -> bool:
    """Whether a loss is a plain sum over examples, which nobody divides."""
    return loss_reduction(loss) == "sum"


def loss_reduction(loss: keras.losses.Loss) -> str:
    """A loss's reduction: "mean" where a `__call__` of its own replaces Keras' reduction."""
    return "mean" if overrides_call(loss) else loss.reduction


def loss_mask(loss: keras.losses.Loss, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor | None:
    """The mask that Keras applies: the output's own, and the loss's (such as `ignore_class`).

    Args:
        loss: the Keras loss.
        y: [n, ...] labels.
        y_pred: [n, ...] predictions, carrying the output's mask where it has one.

    Returns:
        [n, ...] of bool, or None.
    """
    mask = keras_mask(y_pred)
    if not makes_mask(loss, y, y_pred):
        return mask
    own = keras_mask(_values(loss, y, y_pred))
    return own if mask is None else mask & own


def makes_mask(loss: keras.losses.Loss, y: tf.Tensor, y_pred: tf.Tensor) -> bool:
    """Whether a loss masks by itself (such as by `ignore_class`).

    Asks a graph that is thrown away: the loss may hold assertions, which would keep alive all that
    they look at in the graph of the caller.

    Args:
        loss: the Keras loss.
        y, y_pred: labels and predictions; only their dtypes and shapes count.
    """
    if overrides_call(loss):
        return False
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in (y, y_pred)]
    masked = tf.function(lambda y, y_pred: keras_mask(_values(loss, y, y_pred)), autograph=False)
    return masked.get_concrete_function(*specs).structured_outputs is not None


def _values(loss: keras.losses.Loss, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return loss.call(tf.cast(y, loss.dtype), tf.cast(y_pred, loss.dtype))


@dataclass(frozen=True)
class ModelLoss:
    """A model's own `compute_loss`, a batch mean, in place of one loss for each output.

    compute: (x, y, y_pred, sample_weight, training) -> scalar.
    """

    compute: Callable


@contextmanager
def trackers_kept_out(model: keras.Model, scope: keras.StatelessScope) -> Iterator[None]:
    """Within, metrics that a `compute_loss` updates start at zero and are not kept: Keras' loop
    calls it again, on all predictions.

    Raises:
        ValueError: layers add losses, too: they exist in the towers alone, and would be missing.
    """
    trackers = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    scope.state_mapping.update({id(v): zero for v, zero in trackers})
    yield
    if scope.losses and any(scope.get_current_value(v) is not zero for v, zero in trackers):
        raise ValueError(
            "compute_loss updates a metric, and layers add losses with add_loss: the metric would "
            "miss them. Update the metric in compute_metrics instead."
        )
