"""Holds the rules of TensorFlow's operations on rows of a shard: facts of inputs -> of outputs.

An operation without a rule counts as row by row if its output has a batch axis, else as a fault.
Keras' own layers may combine the rows of a batch (BatchNormalization) without a fault, because they
are known.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf

from towers.machine.user_lines import is_of_keras, is_of_ragged_operations
from towers.graph import elements, reductions
from towers.graph.axes import has_open_rows, open_axis, takes_the_last
from towers.graph.elements import aligned, row_by_row
from towers.graph.facts import ONE_LENGTH, SHARED, Fact, Op


def noise(op: Op) -> Fact:
    """Returns the fact of a tower's noise: rows if its shape has a batch axis, else no row's."""
    is_of_rows = any(fact.has_rows or fact.degree != 0 for fact in op.facts)
    axis = open_axis(op.output) if is_of_rows else None
    return Fact(axis=axis, local=axis is not None)


def hidden(op: Op) -> list[Fact]:
    """Returns the facts of PyFunc or EagerPyFunc, whose Python may do anything with the rows."""
    known = [row_by_row(op, output) for output in op.operation.outputs]
    what = "calls Python (tf.py_function, tf.numpy_function), in a way that towers cannot see into"
    return [op.faulty(fact, what) if fact.local else fact for fact in known]


Rule = Callable[[Op], Fact | list[Fact]]  # a single fact stands for each output

_TABLE: dict[str, Rule] = {
    "Identity StopGradient PreventGradient Snapshot CheckNumerics EnsureShape Neg Real Conj":
        elements.same,
    "IdentityN": lambda op: op.facts,
    "Const": elements.constant,
    "ZerosLike OnesLike": elements.like,
    # one by one
    "Add AddV2 Sub AddN BiasAdd": elements.sum_of_all,
    "Mul MulNoNan": lambda op: aligned(op, op.multiply(op.facts[0], op.facts[1])),
    "RealDiv DivNoNan Div":
        lambda op: aligned(op, op.multiply(op.facts[0], op.facts[1], power=-1)),
    "Square": lambda op: op.multiply(op.facts[0], op.facts[0]),
    "SquaredDifference": elements.squared_difference,
    "Select SelectV2": elements.chosen,
    "Maximum Minimum Pow Equal NotEqual Greater GreaterEqual Less LessEqual LogicalAnd "
    "LogicalOr Atan2 Xdivy Xlogy Xlog1py FloorDiv FloorMod": elements.paired,
    # moved, picked, put together
    "Reshape Squeeze ExpandDims Transpose Pad PadV2 MirrorPad": elements.moved,
    "MatrixDiagPartV3 MatrixDiagV3 MatrixBandPart Diag DiagPart":
        lambda op: op.facts[0] if op.facts[0].is_value else row_by_row(op),
    "BroadcastTo Tile Fill": elements.repeated,
    "Cast": elements.cast,
    "RaggedTensorToVariant": lambda op: replace(row_by_row(op), each=1),  # one row per example
    "StridedSlice Slice": elements.sliced,
    "GatherV2": elements.gathered,
    "TensorScatterUpdate TensorScatterSub TensorScatterMax TensorScatterMin":
        elements.overwritten,
    "Where": elements.where,
    "DynamicPartition": lambda op: replace(op.combine(op.facts), each=None),
    "ConcatV2": elements.concatenated,
    "Pack": elements.stacked,
    "Unpack": elements.unstacked,
    "Split SplitV": elements.split,
    # numbers
    "Shape Size": elements.shape,
    "Rank LinSpace BroadcastArgs BroadcastGradientArgs": lambda op: SHARED,
    "Range": elements.numbered,
    # along axes
    "Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm": reductions.reduced,
    "L2Loss": reductions.half_square,
    "Softmax LogSoftmax TopKV2 Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll":
        reductions.along,
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits":
        functools.partial(reductions.of_last_axes, 1),
    "Svd Qr MatrixInverse Cholesky MatrixDeterminant LogMatrixDeterminant MatrixSolve "
    "MatrixSolveLs MatrixTriangularSolve SelfAdjointEigV2 Eig MatrixExponential":
        functools.partial(reductions.of_last_axes, 2),
    "RandomShuffle Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2":
        reductions.reordered,
    "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum": reductions.matrices,
    "UnsortedSegmentSum SegmentSum SegmentSumV2 ScatterNd TensorScatterAdd":
        reductions.segments,
    "SparseToDense SparseTensorDenseMatMul SparseReduceSum": reductions.of_sparse,
    # each tower draws its classes: candidates, expected counts of labels and of candidates
    "UniformCandidateSampler LogUniformCandidateSampler FixedUnigramCandidateSampler "
    "LearnedUnigramCandidateSampler AllCandidateSampler":
        lambda op: [SHARED, op.facts[0], SHARED],
    "PyFunc EagerPyFunc PyFuncStateless": hidden,
}
_RULES = {name: rule for names, rule in _TABLE.items() for name in names.split()}
_NOISE = (
    "Random", "StatelessRandom", "TruncatedNormal", "StatelessTruncated", "Parameterized",
    "StatelessParameterized", "Stateful",
)


def infer(op: Op) -> list[Fact]:
    """Returns the facts of an operation's outputs, except for calls of functions (rows.py)."""
    rule = _RULES.get(op.type) or (noise if op.type.startswith(_NOISE) else None)
    outputs = op.operation.outputs
    found = [row_by_row(op, v) for v in outputs] if rule is None else rule(op)
    return found if isinstance(found, list) else [found] * len(outputs)


_NORMALIZATION = "layers/normalization"
_MASKS = ("NotEqual", "Equal", "Greater")  # they compare elements with the value of padding
# The value of these for a row depends on the amount of padding after it.
_OF_LENGTHS = ("Mean", "Max", "Min", "Prod", "Softmax", "LogSoftmax", "While", "StatelessWhile")


def forgiven(op: Op, fact: Fact) -> Fact:
    """Removes the faults that Keras' own layers, its losses and ragged tensors have by design."""
    if fact.fault is None or fact.fault.operation is not op.operation:
        return fact
    is_condition = op.type in ("If", "StatelessIf")
    is_index = not op.output.dtype.is_floating
    # Hinge losses test whether all labels are 0 or 1. The result for a shard serves as well.
    if is_condition and is_of_keras(op.operation, "losses"):
        return replace(fact, fault=None)
    # Ragged operations compare and look up the ends of rows.
    if (is_condition or is_index) and is_of_ragged_operations(op.operation):
        return replace(fact, fault=None)
    # BatchNormalization is the only normalization over the rows of a batch.
    layers = f"{_NORMALIZATION}/batch_normalization" if is_of_keras(
        op.operation, _NORMALIZATION) else "layers"
    if not any(f.fault for f in op.facts) and is_of_keras(op.operation, layers):
        return Fact(axis=fact.axis, local=True, each=fact.each) if fact.has_rows else SHARED
    return fact


def with_padding(op: Op, output: tf.Tensor, fact: Fact) -> Fact:
    """Returns the fact of an output, with the facts on padding to the shard's longest row."""
    if op.type == "RaggedTensorToTensor":
        return replace(fact, padded=has_open_rows(output))
    if any(f.masks for f in op.facts):
        return replace(fact, masks=True)
    if not any(f.padded for f in op.facts):
        return fact
    if op.type in _MASKS:
        return replace(fact, masks=True)
    depends = op.type in _OF_LENGTHS or takes_the_last(op)
    if depends and not fact.fault and not fact.is_value:
        return op.faulty(
            fact, "computes with padding, as long as the longest row of the batch", ONE_LENGTH
        )
    return replace(fact, padded=fact.has_rows and has_open_rows(output))
