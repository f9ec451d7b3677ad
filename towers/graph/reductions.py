"""Holds the rules of operations along axes, which may include the batch axis."""

from dataclasses import replace

import tensorflow as tf

from towers.graph.axes import contracted, named_axes, open_axis
from towers.graph.elements import product_of, row_by_row, scattered_axes
from towers.graph.facts import CHOSEN, MASKED, MIXES, SHARED, UNKNOWN, Fact, Op


def reduced(op: Op) -> Fact:
    """Returns the fact of Sum, Mean, Max or another reduction, over listed axes or over all."""
    fact, output, is_linear = op.facts[0], op.output, op.type in ("Sum", "Mean")
    if fact.fault:
        return replace(fact, axis=None if output.shape.rank == 0 else fact.axis)
    if fact.parts:
        return _reduced_sizes(op, fact)
    if not fact.has_rows:
        return fact if is_linear else op.nonlinear(fact)
    axes = named_axes(op)
    if axes is None and open_axis(output) is not None:
        return replace(fact, axis=open_axis(output, fact.axis))
    if axes is None or fact.axis in axes or fact.axis == UNKNOWN and output.shape == ():
        return _over_rows(op, fact)
    result = fact if is_linear or op.type in ("Max", "Min") else op.nonlinear(fact)
    if result.axis is None or result.axis == UNKNOWN or open_axis(output) == result.axis:
        return result
    kept = "keep_dims" in op.operation.node_def.attr and op.operation.get_attr("keep_dims")
    removed = 0 if kept else sum(axis < result.axis for axis in axes)
    return replace(result, axis=result.axis - removed)


def _over_rows(op: Op, fact: Fact) -> Fact:
    whole = Fact(local=fact.local, degree=fact.degree)
    if op.type == "Mean":
        return whole if fact.each is not None else op.faulty(whole, CHOSEN, MASKED)
    if op.type == "Sum":
        return summed(fact)
    return op.faulty(whole, f"takes {op.type} over the rows of the batch") if fact.local else (
        Fact(degree=None))


def _reduced_sizes(op: Op, fact: Fact) -> Fact:
    are_alike = len(set(fact.parts)) == 1 and op.type in ("Max", "Min", "Mean")
    if are_alike or len(fact.parts) == 1:
        return fact.parts[0]
    if op.type == "Prod":
        return product_of(op, fact)
    return Fact(local=fact.local, degree=0 if fact.degree == 0 else None)


def half_square(op: Op) -> Fact:
    """Returns the fact of L2Loss."""
    square = op.multiply(op.facts[0], op.facts[0])
    return replace(square, axis=None) if square.fault or not square.has_rows else summed(square)


def summed(fact: Fact) -> Fact:
    """Returns the fact of the sum over the rows."""
    return Fact(local=fact.local, degree=None if fact.degree is None else fact.degree + 1)


def along(op: Op) -> Fact:
    """Returns the fact of Softmax, TopKV2 (last axis), Cumsum, ReverseV2 or Roll (listed axes)."""
    fact, rank = op.facts[0], op.inputs[0].shape.rank
    is_linear = op.type in ("Cumsum", "ReverseV2", "Roll")
    if fact.has_rows and rank is None:
        return fact
    if fact.has_rows:
        names = is_linear or op.type in ("Cumprod", "CumulativeLogsumexp")
        axes = named_axes(op, 2 if op.type == "Roll" else 1) if names else [rank - 1]
        are_splits = (  # row_splits from lengths
            op.type == "Cumsum" and fact.each is None and op.output.dtype.is_integer
        )
        if (axes is None or fact.axis in axes) and not are_splits:
            return op.faulty(fact, f"({op.type}) {MIXES}")
    return fact if is_linear else op.nonlinear(fact)


def of_last_axes(count: int, op: Op) -> Fact:
    """Returns the fact of a cross-entropy (count 1) or a matrix decomposition (count 2).

    Rows are mixed if the batch axis is one of the last `count` axes.
    """
    fact, rank = row_by_row(op), op.inputs[0].shape.rank
    is_mixed = fact.has_rows and rank is not None and any(
        f.axis is not None and f.axis >= rank - count for f in op.facts
    )
    return op.faulty(fact, f"({op.type}) {MIXES}") if is_mixed else fact


def reordered(op: Op) -> Fact:
    """Returns the fact of RandomShuffle or Unique, which work along the first axis."""
    fact = op.facts[0]
    return op.faulty(fact, f"({op.type}) {MIXES}") if fact.has_rows else row_by_row(op)


def matrices(op: Op) -> Fact:
    """Returns the fact of MatMul, BatchMatMul or Einsum: products of rows, or their sum."""
    left, right = (*op.facts, SHARED)[:2]  # an Einsum may have one input
    product = op.multiply(left, right)
    if product.fault or not product.has_rows:
        return product
    over_rows, axis = contracted(op)
    if over_rows:
        return summed(product)
    if axis is None:
        return op.faulty(product, "compares rows of the batch with each other")
    return replace(product, axis=axis)


def segments(op: Op) -> Fact:
    """Returns the fact of UnsortedSegmentSum, ScatterNd ..., which add rows up by an index."""
    is_tensors, is_segments = op.type.startswith("Tensor"), "Segment" in op.type
    places = (1, 0) if op.type == "ScatterNd" else (2, 1) if is_tensors else (0, 1)
    fact, ids = (op.facts[place] for place in places)
    if not fact.has_rows or fact.fault:
        return row_by_row(op)
    fact = replace(fact, local=fact.local or ids.local, axis=open_axis(op.output))
    if fact.axis is None:
        return summed(fact)
    if is_tensors and fact.axis >= scattered_axes(op):
        return fact
    # These are rows of a ragged tensor, chosen rows, or rows scattered to an index per row.
    if None in (fact.each, ids.each) or not is_segments and ids.has_rows:
        return replace(fact, each=1)
    return op.faulty(fact, f"({op.type}) {MIXES}")


def of_sparse(op: Op) -> Fact:
    """Returns the fact of SparseToDense, SparseTensorDenseMatMul or SparseReduceSum of rows."""
    fact, is_sum = row_by_row(op), op.type == "SparseReduceSum"
    axes = tf.get_static_value(op.inputs[3]) if is_sum else ()
    if fact.fault or axes is None or not fact.has_rows and not is_sum:
        return fact
    return summed(replace(op.facts[1], degree=0)) if 0 in axes else replace(fact, axis=0, each=1)
