"""Sums over the rows of a batch, found in the graph: where a scalar is no mean."""

import warnings

import tensorflow as tf

from towers.levels.lines import current_line
from towers.own_step.meetings import has_rows

# Through these a sum stays one; a product or a quotient with a constant does not make it a mean.
_LINEAR = ("AddV2", "Sub", "Neg", "Identity", "Mul", "RealDiv", "DivNoNan", "Cast")


def is_row_sum(tensor: tf.Tensor) -> bool:
    """Whether a scalar is `tf.reduce_sum` over a batch axis: then towers' sums add up."""
    operation = tensor.op
    if operation.type != "Sum" or not has_rows(operation.inputs[0]):
        return False
    axes = tf.get_static_value(operation.inputs[1])
    return axes is not None and 0 in axes.reshape(-1)


def warn_of_sums(loss: tf.Tensor) -> None:
    """Warns where a scalar that is taken for a mean holds a sum over rows."""
    stack = [loss]
    while stack:
        tensor = stack.pop()
        if is_row_sum(tensor):
            warnings.warn(
                f"{current_line()} takes the gradient of a scalar that holds a sum over the rows "
                "of a batch; towers take a scalar for a mean. Use tf.reduce_mean, or divide by "
                "tf.shape(x)[0].",
                stacklevel=2,
            )
            return
        stack.extend(_linear_parts(tensor))


def _linear_parts(tensor: tf.Tensor) -> list[tf.Tensor]:
    """What a tensor is linear in, as far as it shows."""
    operation = tensor.op
    if operation.type not in _LINEAR:
        return []
    inputs = list(operation.inputs)
    if operation.type in ("Mul", "RealDiv", "DivNoNan"):
        constant = [tf.get_static_value(v) is not None for v in inputs]
        return [v for v, is_constant in zip(inputs, constant, strict=True)
                if not is_constant] if any(constant) else []
    return [v for v in inputs if v.shape.rank == 0]
