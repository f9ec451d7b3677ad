"""Losses of a model's outputs, and the weight that a shard's loss has in the global batch's.

Keras reduces a batch's per-example losses to one number, `L_i` for shard i. The global batch's loss
is then exactly

    sum(w_i * L_i) / sum(w_i)        w_i: the denominator of Keras' reduction on shard i

so that a tower that multiplies its loss by its share, w_i / sum(w_i), before its gradient makes the
averaging of losses and gradients a plain sum.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.keras_internals import function_loss, keras_mask
from towers.step.sharding import Structure

_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")


class OutputLoss(NamedTuple):
    """The loss of one output of the model, and its factor in the total loss."""

    loss: keras.losses.Loss
    factor: float


@dataclass(frozen=True)
class ModelLoss:
    """A model's own `compute_loss`, a batch mean, in place of one loss for each output.

    compute: (x, y, y_pred, sample_weight, training) -> scalar.
    """

    compute: Callable


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


def shard_weight(
    loss: keras.losses.Loss,
    sample_weight: tf.Tensor | None,
    size: tf.Tensor,
    mask: tf.Tensor | None = None,
) -> tf.Tensor:
    """w_i: the denominator of Keras' reduction of this loss on this shard.

    | reduction               | w_i                                                          |
    | ----------------------- | ------------------------------------------------------------ |
    | sum_over_batch_size     | examples; the count of valid steps where there is a mask     |
    | mean_with_sample_weight | the sum of the sample weights, over the valid steps          |
    | sum                     | 1, and the caller does not divide                            |

    Source: `reduce_weighted_values` and `apply_mask` in keras/src/losses/loss.py.

    Args:
        loss: the Keras loss.
        sample_weight: [n, ...], or None for 1 everywhere.
        size: scalar int32, the examples of the shard that count.
        mask: [n, ...] of bool, or None.

    Returns:
        A scalar float64, 0 for an empty shard.
    """
    reduction = loss_reduction(loss)
    if divides_by_weights(loss, sample_weight):
        weight = tf.cast(sample_weight, tf.float64)
        if mask is not None:
            while weight.shape.rank < mask.shape.rank:
                weight = weight[..., tf.newaxis]
            weight = weight * tf.cast(mask, tf.float64)
        weight = tf.reduce_sum(weight)
    elif reduction != "sum" and mask is not None:
        weight = tf.reduce_sum(tf.cast(mask, tf.float64))
    elif reduction == "sum":
        weight = tf.ones([], tf.float64)
    else:
        weight = tf.cast(size, tf.float64)
    return tf.where(size > 0, weight, 0.0)


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


def divides_by_weights(loss: keras.losses.Loss, sample_weight: Any) -> bool:
    """Whether Keras divides the loss by the sum of the sample weights."""
    return loss_reduction(loss) == "mean_with_sample_weight" and sample_weight is not None


def summed(loss: keras.losses.Loss) -> keras.losses.Loss:
    """The same loss, which nobody divides."""
    found = copy.copy(loss)
    found.reduction = "sum"
    return found


def overrides_call(loss: keras.losses.Loss) -> bool:
    """Whether a loss replaces `Loss.__call__` and with it Keras' reduction."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


def is_sum(loss: keras.losses.Loss) -> bool:
    """Whether a loss is a plain sum over examples, which nobody divides."""
    return loss_reduction(loss) == "sum"


def loss_reduction(loss: keras.losses.Loss) -> str:
    """The reduction; a loss with a `__call__` of its own is taken for a mean over examples."""
    return "mean" if overrides_call(loss) else loss.reduction


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
