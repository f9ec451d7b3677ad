"""NaN and infinity: found in each tower before the update, and named by tower and variable.

    tower 0 ... tower T-1  ->  [T, 1 + V] bool: its loss, and each gradient, is finite
                               all of them: update          else: change nothing
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.step.averaging import Values


class NonFiniteError(ValueError):
    """A tower's loss or a gradient is NaN or infinite; the message says whose."""


def checked(nonfinite: str, optimizer: keras.optimizers.Optimizer) -> tuple[str, ...]:
    """The parts of a tower that must be finite; float16's overflow is left to the loss scale."""
    if nonfinite == "apply":
        return ()
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return ("loss",) if is_scaled else ("loss", "gradients")


def are_finite(loss: tf.Tensor, gradients: Values) -> tf.Tensor:
    """[1 + V] bool: whether a loss, and each of V gradients, is finite.

    A gradient is measured by the sum of its squares, in one pass: values of about 1e19 overflow
    there in float32, as they would in Adam's second moment, or in a norm to clip by.

    Args:
        loss: scalar.
        gradients: tensors, IndexedSlices, or None where a variable has no part in the loss.
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
    """The error of a step, such as "the loss of tower 3 on /gpu:3 is NaN or infinite."

    Args:
        finite: [T, 1 + V], not all true: see `are_finite`.
        places: the device, or the worker, of each tower.
        variables: the V trainable variables.
    """
    tower = next(t for t, row in enumerate(finite) if not all(row))
    index = list(finite[tower]).index(False)
    what = f"the gradient of {variables[index - 1].path} in" if index else "the loss of"
    return NonFiniteError(f"{what} tower {tower} on {places[tower]} is NaN or infinite.")
