"""Operations along axes, the batch axis among them: facts of inputs -> of the output."""

from dataclasses import replace

import tensorflow as tf

from towers.graph.axes import contracted, open_axis, reduced_axes
from towers.graph.facts import MASKED, SHARED, UNKNOWN, Fact, multiplied, nonlinear
from towers.graph.row_by_row import Inputs, faulty, row_by_row

MIXES = "brings rows of the batch together, or into another order"
CHOSEN = "takes the mean over rows that their own values choose"


def reduced(operation: tf.Operation, facts: Inputs) -> Fact:
    """Sum, Mean, Max and others, over axes that are named or over all."""
    fact, kind = facts[0], operation.type
    if fact.fault:
        return replace(fact, axis=None if operation.outputs[0].shape.rank == 0 else fact.axis)
    if fact.parts:
        return _reduced_sizes(operation, fact)
    if not fact.has_rows:
        return fact if kind in ("Sum", "Mean") else nonlinear(operation, fact)
    axes, output = reduced_axes(operation), operation.outputs[0]
    if axes is None and open_axis(output) is not None:
        return replace(fact, axis=open_axis(output, fact.axis))
    if axes is None or fact.axis in axes or fact.axis == UNKNOWN and output.shape == ():
        return _over_rows(operation, fact)
    kept = operation.get_attr("keep_dims") if "keep_dims" in operation.node_def.attr else False
    result = fact if kind in ("Sum", "Mean", "Max", "Min") else nonlinear(operation, fact)
    if kept or fact.axis is None or fact.axis == UNKNOWN:
        return result
    return replace(result, axis=fact.axis - sum(axis < fact.axis for axis in axes))


def _over_rows(operation: tf.Operation, fact: Fact) -> Fact:
    kind = operation.type
    whole = Fact(local=fact.local, degree=fact.degree)
    if kind == "Mean":
        return whole if fact.each is not None else faulty(operation, whole, CHOSEN, MASKED)
    if kind == "Sum":
        return summed(fact)
    if not fact.local:
        return Fact(degree=None)
    return faulty(operation, whole, f"takes {kind} over the rows of the batch")


def _reduced_sizes(operation: tf.Operation, fact: Fact) -> Fact:
    if len(set(fact.parts)) == 1 and operation.type in ("Max", "Min", "Mean"):
        return fact.parts[0]
    if len(fact.parts) == 1:
        return fact.parts[0]
    if operation.type == "Prod":
        return product_of(operation, fact.parts)
    return Fact(local=fact.local, degree=0 if fact.degree == 0 else None)


def half_square(operation: tf.Operation, facts: Inputs) -> Fact:
    """L2Loss."""
    square = multiplied(operation, facts[0], facts[0])
    if square.fault or not square.has_rows:
        return replace(square, axis=None)
    return summed(square)


def summed(fact: Fact) -> Fact:
    """Rows that are added up."""
    return Fact(local=fact.local, degree=None if fact.degree is None else fact.degree + 1)


def along(operation: tf.Operation, facts: Inputs) -> Fact:
    """Softmax, TopKV2 along the last axis; Cumsum, ReverseV2, Roll along those that they name."""
    fact, kind = facts[0], operation.type
    rank = operation.inputs[0].shape.rank
    if not fact.has_rows:
        return fact if kind in ("Cumsum", "ReverseV2", "Roll") else nonlinear(operation, fact)
    if rank is None:
        return fact
    if kind in ("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2"):
        axes = reduced_axes(operation)
    elif kind == "Roll":
        axes = reduced_axes(operation, 2)
    else:
        axes = [rank - 1]
    are_splits = kind == "Cumsum" and fact.each is None and operation.outputs[0].dtype.is_integer
    if (axes is None or fact.axis in axes) and not are_splits:  # row_splits of lengths
        return faulty(operation, fact, f"({kind}) {MIXES}")
    return fact if kind in ("Cumsum", "ReverseV2", "Roll") else nonlinear(operation, fact)


def decomposed(operation: tf.Operation, facts: Inputs) -> Fact:
    """The fact of decompositions of whole matrices: those that the last two axes make."""
    fact, rank = row_by_row(operation, facts, operation.outputs[0]), operation.inputs[0].shape.rank
    if fact.has_rows and rank is not None and any(f.has_rows and f.axis >= rank - 2 for f in facts):
        return faulty(operation, fact, f"({operation.type}) {MIXES}")
    return fact


def entropies(operation: tf.Operation, facts: Inputs) -> Fact:
    """The facts of the entropies of each row of the logits' last axis."""
    fact, rank = row_by_row(operation, facts, operation.outputs[0]), operation.inputs[0].shape.rank
    if rank is not None and facts[0].axis == rank - 1:
        return faulty(operation, fact, f"({operation.type}) {MIXES}")
    return fact


def reordered(operation: tf.Operation, facts: Inputs) -> Fact:
    """RandomShuffle, Unique: over the first axis."""
    fact = facts[0]
    return faulty(operation, fact, f"({operation.type}) {MIXES}") if fact.has_rows else row_by_row(
        operation, facts, operation.outputs[0])


# Matrices.


def matrices(operation: tf.Operation, facts: Inputs) -> Fact:
    """MatMul, BatchMatMul, Einsum: a sum over rows of products, or products row by row."""
    left, *rest = facts
    if not rest:  # Einsum of one
        rest = [SHARED]
    product = multiplied(operation, left, rest[0])
    if product.fault or not product.has_rows:
        return product
    over_rows, axis = contracted(operation, [fact.axis for fact in facts])
    if over_rows:
        return summed(product)
    if axis is None:
        return faulty(operation, product, "compares rows of the batch with each other")
    return replace(product, axis=axis)


def segments(operation: tf.Operation, facts: Inputs) -> Fact:
    """UnsortedSegmentSum, ScatterNd ...: rows added up by an index."""
    place = 1 if operation.type == "ScatterNd" else 2 if operation.type.startswith("Tensor") else 0
    fact = facts[place]
    ids = facts[0] if operation.type == "ScatterNd" else facts[1]
    if not fact.has_rows or fact.fault:
        return row_by_row(operation, [fact, ids], operation.outputs[0])
    fact = replace(fact, local=fact.local or ids.local)
    axis = open_axis(operation.outputs[0])
    if axis is None:
        return summed(fact)
    if operation.type.startswith("Tensor") and axis >= scattered_axes(operation):
        return replace(fact, axis=axis)
    # The rows of a ragged tensor, chosen ones, or rows that are put in their own places.
    if None in (fact.each, ids.each) or "Segment" not in operation.type and ids.has_rows:
        return replace(fact, axis=axis, each=1)
    return faulty(operation, replace(fact, axis=axis), f"({operation.type}) {MIXES}")


def scattered_axes(operation: tf.Operation) -> int:
    """The number of first axes that the indices of a TensorScatter operation name."""
    return operation.inputs[1].shape[-1] or operation.inputs[0].shape.rank or 0


def of_sparse(operation: tf.Operation, facts: Inputs) -> Fact:
    """SparseToDense, SparseTensorDenseMatMul, SparseReduceSum: entries become the rows again."""
    fact = row_by_row(operation, facts, operation.outputs[0])
    is_sum = operation.type == "SparseReduceSum"
    axes = tf.get_static_value(operation.inputs[3]) if is_sum else ()
    if fact.fault or axes is None or not fact.has_rows and not is_sum:
        return fact
    if 0 in axes:
        return summed(replace(facts[1], degree=0))
    return replace(fact, axis=0, each=1)


def product_of(operation: tf.Operation, parts: Inputs) -> Fact:
    """The product of sizes."""
    result = SHARED
    for part in parts:
        result = multiplied(operation, result, part)
    return result
