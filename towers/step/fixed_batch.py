"""Finds batch sizes that are written into a model's code; a tower's shard is smaller."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from towers.graph.dependence import Dependence
from towers.machine.user_lines import line_of
from towers.step.tensor_rows import is_composite

_CLASSES = "SparseSoftmaxCrossEntropyWithLogits"  # its labels have one axis less than its logits
# Operations that pair the rows of two tensors.
_ROW_BY_ROW = (
    "AddV2", "Sub", "Mul", "RealDiv", "SquaredDifference", "Maximum", "Minimum", "Equal",
    "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "SelectV2",
    "SoftmaxCrossEntropyWithLogits", _CLASSES,
)


class BatchInCode(ValueError):
    """Signals that a model or a loss has a fixed batch size in its code."""


def check_open_batch(outputs: Sequence[Any], facts: Any) -> None:
    """Raises BatchInCode if a model returns a fixed number of rows for any batch.

    Args:
        outputs: the model's flattened outputs, symbolic tensors [n, ...].
        facts: the ShardFacts of their graph.
    """
    dense = [output for output in outputs if not is_composite(output)]
    if dense:
        check_no_fixed_batch(dense[0].graph, facts.dependence)
    for output in dense:
        operation = _fixing(output, facts.dependence)
        if operation is not None and facts.rows.kind(output).fault:
            raise BatchInCode(
                f"{line_of(operation)} makes {output.shape[0]} rows of any batch: the batch size "
                "is written into the code. Take it from the data: tf.shape(x)[0]."
            )


def _fixing(tensor: tf.Tensor, dependence: Dependence) -> tf.Operation | None:
    """Returns the operation that fixed the number of a shard's rows; None if none did."""
    while tensor.shape.rank and (tensor.shape[0] or 0) > 1:
        shards = [v for v in tensor.op.inputs if dependence.local(v, but_sizes=True)]
        if not shards:
            return None
        if any(v.shape.rank and v.shape[0] is None for v in shards):
            return tensor.op
        tensor = shards[0]
    return None


def check_no_fixed_batch(graph: tf.Graph, dependence: Dependence) -> None:
    """Raises BatchInCode if a shard's rows are paired with a fixed number of other rows.

    Args:
        graph: the graph of a traced tower or loss.
        dependence: which of the graph's tensors depend on the shard.
    """
    for operation in graph.get_operations():
        if operation.type not in _ROW_BY_ROW:
            continue
        inputs, missing = list(operation.inputs), int(operation.type == _CLASSES)
        ranked = [v for v in inputs if v.shape.rank]
        rows = [v for v in ranked if v.shape[0] is None and dependence.local(v)]
        for fixed in ranked:
            is_paired = any(v.shape.rank == fixed.shape.rank + missing for v in rows)
            if is_paired and (fixed.shape[0] or 0) > 1:
                raise BatchInCode(
                    f"{line_of(operation)} pairs the rows of a shard with {fixed.shape[0]} others: "
                    "the batch size is written into the code. Take it from the data: "
                    "tf.shape(x)[0], or tf.ones_like and tf.zeros_like."
                )
