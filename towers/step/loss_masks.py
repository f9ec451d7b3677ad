"""The steps of a sequence, or the pixels, that a loss leaves out."""

import keras
import tensorflow as tf

from towers.machine.keras_internals import keras_mask
from towers.step.outputs import overrides_call


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
