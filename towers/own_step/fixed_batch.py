"""Refuses a batch size that is written into the code: towers have smaller batches of their own."""

import tensorflow as tf

from towers.levels.dependence import Dependence
from towers.levels.lines import line_of
from towers.own_step.meetings import has_rows

_CLASSES = "SparseSoftmaxCrossEntropyWithLogits"  # whose labels have an axis less
# What pairs the rows of two tensors.
_ROW_BY_ROW = (
    "AddV2", "Sub", "Mul", "RealDiv", "SquaredDifference", "Maximum", "Minimum", "Equal",
    "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "SelectV2",
    "SoftmaxCrossEntropyWithLogits", _CLASSES,
)


def check_no_fixed_batch(graph: tf.Graph, dependence: Dependence) -> None:
    """Raises ValueError where the rows of a shard are paired with a fixed number of others.

    Args:
        graph: of the traced step.
        dependence: of its tensors.
    """
    for operation in graph.get_operations():
        if operation.type not in _ROW_BY_ROW:
            continue
        inputs, missing = list(operation.inputs), int(operation.type == _CLASSES)
        ranked = [v for v in inputs if v.shape.rank]
        rows = [v for v in ranked if has_rows(v) and dependence.local(v)]
        for fixed in ranked:
            is_paired = any(v.shape.rank == fixed.shape.rank + missing for v in rows)
            if is_paired and (fixed.shape[0] or 0) > 1:
                raise ValueError(
                    f"{line_of(operation)} pairs the rows of a shard with {fixed.shape[0]} others: "
                    "the batch size is written into the code. Take it from the data: "
                    "tf.shape(x)[0], or tf.ones_like and tf.zeros_like."
                )
