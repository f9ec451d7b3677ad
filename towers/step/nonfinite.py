"""Finds NaN and infinity in each tower before the update, and names tower and variable.

    tower 0 ... tower T-1  ->  [T, 1 + V] bool: the tower's loss, and each gradient, is finite
                               if all are true: update          otherwise: change nothing
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.step.averaging import Values


class NonFiniteError(ValueError):
    """Signals that a tower's loss or gradient is NaN or infinite, and names the tower."""


def checked(nonfinite: str, optimizer: keras.optimizers.Optimizer) -> tuple[str, ...]:
    """Returns which results must be finite; a LossScaleOptimizer checks gradients itself."""
    if nonfinite == "apply":
        return ()
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return ("loss",) if is_scaled else ("loss", "gradients")


def are_finite(loss: tf.Tensor, gradients: Values) -> tf.Tensor:
    """Returns [1 + V] bool: whether a loss, and each of V gradients, is finite.

    The test is one pass: is the sum of a gradient's squares finite? Values of about 1e19 overflow
    it in float32, but also overflow Adam's second moment and the norm for clipping.

    Args:
        loss: a scalar.
        gradients: V tensors, IndexedSlices, or None for a variable that the loss does not use.
    """
    dtype = _at_least_float32(loss.dtype)
    squares = []
    for gradient in gradients:
        if gradient is None:
            squares.append(tf.zeros([], dtype))
            continue
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        values = tf.cast(values, _at_least_float32(values.dtype))
        squares.append(tf.cast(tf.nn.l2_loss(values), dtype))  # half of the sum
    return tf.math.is_finite(tf.stack([tf.cast(loss, dtype), *squares]))


def _at_least_float32(dtype: tf.DType) -> tf.DType:
    return dtype if dtype.size >= 4 else tf.float32


def nonfinite_error(
    finite: Sequence[Sequence[bool]], places: Sequence[str], variables: Sequence[keras.Variable]
) -> NonFiniteError:
    """Returns an error such as "the loss of tower 3 on /gpu:3 is NaN or infinite."

    Args:
        finite: `are_finite` of each tower, [T, 1 + V], not all true.
        places: the device, or the worker, of each tower.
        variables: the V trainable variables.
    """
    tower = next(t for t, row in enumerate(finite) if not all(row))
    index = list(finite[tower]).index(False)
    what = f"the gradient of {variables[index - 1].path} in" if index else "the loss of"
    return NonFiniteError(f"{what} tower {tower} on {places[tower]} is NaN or infinite.")
