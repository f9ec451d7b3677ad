"""Finds a loss's reduction and the mask that it applies; wraps a custom `compute_loss`."""

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
    """Signals that a loss has no reduction, so it is not one number."""


def check_reduction(loss: keras.losses.Loss) -> None:
    """Raises NoNumber if a loss has no reduction."""
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
    """Returns a loss's reduction; "mean" if a custom `__call__` replaces Keras' reduction."""
    return "mean" if overrides_call(loss) else loss.reduction


def with_reduction(loss: keras.losses.Loss, reduction: str) -> keras.losses.Loss:
    """Returns a shallow copy of a loss with another reduction; `copy.copy` would serialize it."""
    copied = object.__new__(type(loss))
    vars(copied).update(vars(loss))
    copied.reduction = reduction
    return copied


def loss_mask(loss: keras.losses.Loss, y: Structure, y_pred: Structure) -> tf.Tensor | None:
    """Returns the mask that Keras applies: the output's mask & the loss's (such as `ignore_class`).

    Args:
        loss: the Keras loss.
        y: labels [n, ...], or a structure of these.
        y_pred: predictions of the same form, which carry the output's mask if it has one.

    Returns:
        A bool tensor [n, ...], or None.
    """
    mask = keras_mask(y_pred)
    if not makes_mask(loss, y, y_pred):
        return mask
    own = keras_mask(_values(loss, y, y_pred))
    return own if mask is None else mask & own


def makes_mask(loss: keras.losses.Loss, y: Structure, y_pred: Structure) -> bool:
    """Whether a loss makes a mask, such as for `ignore_class`.

    The loss is traced in a scratch graph: its assertions would keep all that they read alive in the
    caller's graph.

    Args:
        loss: the Keras loss.
        y, y_pred: labels and predictions, or their specs; only dtypes and shapes matter.
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
    """Wraps a custom `compute_loss`, which replaces the losses of the outputs.

    compute: (x, y, y_pred, sample_weight, training) -> scalar, a mean over the batch.
    """

    compute: Callable


@contextmanager
def trackers_kept_out(model: keras.Model, scope: keras.StatelessScope) -> Iterator[None]:
    """Discards the metric updates of a `compute_loss` inside the with block.

    Metrics start at zero there. They are updated later, on the predictions of all towers.

    Raises:
        NeedsOtherTowers: layers add losses, too, which that later update would not see.
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
