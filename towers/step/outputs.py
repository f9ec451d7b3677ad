"""Tells the reduction of a loss and the mask that it applies; holds a model's own loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import tensorflow as tf

from towers.machine.loss_internals import keras_mask
from towers.step.gathering import NeedsOtherTowers
from towers.step.structures import Structure, map_tensors

_REDUCTIONS = ("sum_over_batch_size", "mean", "mean_with_sample_weight", "sum")


class NoNumber(NeedsOtherTowers):
    """A loss without a reduction, which is a value for each example."""


def check_reduction(loss: keras.losses.Loss) -> None:
    """Raises NoNumber where a loss has no reduction."""
    if loss_reduction(loss) not in _REDUCTIONS:
        raise NoNumber(
            f"loss {loss.name!r} has reduction={loss.reduction!r}; a training loss must be one "
            f"number. Use one of {', '.join(_REDUCTIONS)}; or towers.make_parallel(model, gpus), "
            "whose fit takes the gradient of the sum of all values, as Keras does."
        )


def overrides_call(loss: keras.losses.Loss) -> bool:
    """Whether a loss replaces `Loss.__call__` and with it Keras' reduction."""
    return type(loss).__call__ is not keras.losses.Loss.__call__


def loss_reduction(loss: keras.losses.Loss) -> str:
    """A loss's reduction: "mean" where a `__call__` of its own replaces Keras' reduction."""
    return "mean" if overrides_call(loss) else loss.reduction


def with_reduction(loss: keras.losses.Loss, reduction: str) -> keras.losses.Loss:
    """A shallow copy of a loss with another reduction; `copy.copy` would serialize the loss."""
    copied = object.__new__(type(loss))
    vars(copied).update(vars(loss))
    copied.reduction = reduction
    return copied


def loss_mask(loss: keras.losses.Loss, y: Structure, y_pred: Structure) -> tf.Tensor | None:
    """The mask that Keras applies: the output's own, and the loss's (such as `ignore_class`).

    Args:
        loss: the Keras loss.
        y: [n, ...] labels, or a structure of these.
        y_pred: the predictions alike, carrying the output's mask where it has one.

    Returns:
        [n, ...] of bool, or None.
    """
    mask = keras_mask(y_pred)
    if not makes_mask(loss, y, y_pred):
        return mask
    own = keras_mask(_values(loss, y, y_pred))
    return own if mask is None else mask & own


def makes_mask(loss: keras.losses.Loss, y: Structure, y_pred: Structure) -> bool:
    """Whether a loss masks by itself (such as by `ignore_class`).

    Asks a graph that is thrown away: the loss may hold assertions, which would keep alive all that
    they look at in the graph of the caller.

    Args:
        loss: the Keras loss.
        y, y_pred: labels and predictions; only their dtypes and shapes count.
    """
    if overrides_call(loss):
        return False
    specs = map_tensors(
        lambda v: v if isinstance(v, tf.TypeSpec) else tf.type_spec_from_value(v), [y, y_pred]
    )
    masked = tf.function(lambda y, y_pred: keras_mask(_values(loss, y, y_pred)), autograph=False)
    return masked.get_concrete_function(*specs).structured_outputs is not None


def _values(loss: keras.losses.Loss, y: Structure, y_pred: Structure) -> tf.Tensor:
    return loss.call(*map_tensors(lambda v: tf.cast(v, loss.dtype), [y, y_pred]))


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
        NeedsOtherTowers: layers add losses, too: these exist in the towers alone, where the metric
            is updated in its place in the user's step.
    """
    trackers = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
    scope.state_mapping.update({id(v): zero for v, zero in trackers})
    yield
    if scope.losses and any(scope.get_current_value(v) is not zero for v, zero in trackers):
        raise NeedsOtherTowers(
            "compute_loss updates a metric, and layers add losses with add_loss, which the metric "
            "would miss. Use towers.make_parallel(model, gpus), or update the metric in "
            "compute_metrics."
        )
