"""The rules of TensorFlow's operations on the rows of a shard: facts of inputs -> of outputs.

An operation without a rule of its own is taken to work row by row where its output has a batch
axis, and for unknown where it has none. What Keras' own layers do with the rows of a batch
(BatchNormalization) is known, and no fault.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tensorflow as tf

from towers.machine.user_lines import is_of_keras, is_of_ragged_operations
from towers.graph import pieces, reductions
from towers.graph import row_by_row as by_row
from towers.graph.axes import has_open_rows, open_axis, takes_the_last
from towers.graph.facts import ONE_LENGTH, SHARED, Fact
from towers.graph.inner_functions import CALLS, Call, called
from towers.graph.row_by_row import Inputs

_NOISE = (
    "Random", "StatelessRandom", "TruncatedNormal", "StatelessTruncated", "Parameterized",
    "StatelessParameterized", "Stateful",
)


def infer(operation: tf.Operation, facts: Inputs, call: Call) -> list[Fact]:
    """The facts of an operation's outputs."""
    kind = operation.type
    if kind in CALLS:
        results = called(operation, facts, call)
    elif kind in _MANY:
        results = _MANY[kind](operation, facts)
    else:
        rule = _RULES.get(kind) or (_noise if kind.startswith(_NOISE) else None)
        if rule is None:
            results = [by_row.row_by_row(operation, facts, output) for output in operation.outputs]
        else:
            results = [rule(operation, facts)] * len(operation.outputs)
    results = [_forgiven(operation, fact, facts) if fact.fault else fact for fact in results]
    return [
        _with_padding(operation, output, fact, facts)
        for output, fact in zip(operation.outputs, results, strict=True)
    ]


_NORMALIZATION = "layers/normalization"
_MASKS = ("NotEqual", "Equal", "Greater")  # of elements and what padding holds
# Their value for a row depends on the number of elements of padding behind it.
_OF_LENGTHS = ("Mean", "Max", "Min", "Prod", "Softmax", "LogSoftmax", "While", "StatelessWhile")


def _with_padding(operation: tf.Operation, output: tf.Tensor, fact: Fact, facts: Inputs) -> Fact:
    """The fact of an output, with what is known of padding to the shard's longest row."""
    if operation.type == "RaggedTensorToTensor":
        return replace(fact, padded=has_open_rows(output))
    if not any(f.padded or f.masks for f in facts):
        return fact
    if any(f.masks for f in facts) or operation.type in _MASKS:
        return replace(fact, masks=True)
    depends = operation.type in _OF_LENGTHS or takes_the_last(operation)
    if depends and not fact.fault and not fact.is_value:
        return by_row.faulty(
            operation, fact, "computes with padding, as long as the longest row of the batch",
            ONE_LENGTH,
        )
    return replace(fact, padded=fact.has_rows and has_open_rows(output))


def _is_by_nature(operation: tf.Operation) -> bool:
    """Whether a layer of Keras' own does it: BatchNormalization, or none along a given axis."""
    if is_of_keras(operation, _NORMALIZATION):
        return is_of_keras(operation, f"{_NORMALIZATION}/batch_normalization")
    return is_of_keras(operation, "layers")


def _forgiven(operation: tf.Operation, fact: Fact, inputs: Inputs) -> Fact:
    """A fact without a fault that is by nature."""
    assert fact.fault is not None
    if fact.fault.operation is not operation:
        return fact
    is_condition = operation.type in ("If", "StatelessIf")
    is_index = not operation.outputs[0].dtype.is_floating
    # Hinge losses ask whether all labels are 0 or 1. The answer for a shard does as well.
    if is_condition and is_of_keras(operation, "losses"):
        return replace(fact, fault=None)
    # Ragged operations compare and look up where rows end.
    if (is_condition or is_index) and is_of_ragged_operations(operation):
        return replace(fact, fault=None)
    begins = all(f.fault is None for f in inputs)
    if begins and _is_by_nature(operation):
        return Fact(axis=fact.axis, local=True, each=fact.each) if fact.has_rows else SHARED
    return fact


def _noise(operation: tf.Operation, facts: Inputs) -> Fact:
    """A tower's own: of its rows, or of no row."""
    is_of_rows = any(f.has_rows or f.degree != 0 for f in facts)
    axis = open_axis(operation.outputs[0]) if is_of_rows else None
    return Fact(axis=axis, local=axis is not None)


def _each_its_own(operation: tf.Operation, facts: Inputs) -> list[Fact]:
    """IdentityN."""
    return list(facts)


def _hidden(operation: tf.Operation, facts: Inputs) -> list[Fact]:
    """PyFunc, EagerPyFunc: Python computes it, and may do anything with the rows."""
    known = [by_row.row_by_row(operation, facts, output) for output in operation.outputs]
    what = "calls Python (tf.py_function, tf.numpy_function), in a way that towers cannot see into"
    return [by_row.faulty(operation, fact, what) if fact.local else fact for fact in known]


def _candidates(operation: tf.Operation, facts: Inputs) -> list[Fact]:
    """CandidateSampler: classes that each tower draws for itself, and how often, as noise."""
    return [SHARED, facts[0], SHARED]


_MANY: dict[str, Callable[[tf.Operation, Inputs], list[Fact]]] = {
    "IdentityN": _each_its_own,
    "Unpack": pieces.unstacked,
    **dict.fromkeys((
        "UniformCandidateSampler", "LogUniformCandidateSampler", "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler", "AllCandidateSampler",
    ), _candidates),
    "EagerPyFunc": _hidden,
    "PyFunc": _hidden,
    "PyFuncStateless": _hidden,
    "Split": pieces.split,
    "SplitV": pieces.split,
}


def _ruled(names: str, rule: Any) -> dict[str, Any]:
    return {name: rule for name in names.split()}


_RULES: dict[str, Callable[[tf.Operation, Inputs], Fact]] = {
    **_ruled("Identity StopGradient PreventGradient Snapshot CheckNumerics EnsureShape Neg Real "
             "Conj", by_row.same),
    **_ruled("Reshape Squeeze ExpandDims Transpose Pad PadV2 MirrorPad", by_row.moved),
    **_ruled("MatrixDiagPartV3 MatrixDiagV3 MatrixBandPart Diag DiagPart", by_row.linear),
    **_ruled("BroadcastTo Tile Fill", by_row.repeated),
    **_ruled("Cast", by_row.cast),
    **_ruled("RaggedTensorToVariant", by_row.ragged_rows),
    **_ruled("Const", by_row.constant),
    **_ruled("ZerosLike OnesLike", by_row.like),
    **_ruled("Add AddV2 Sub AddN BiasAdd", by_row.sum_of_all),
    **_ruled("Mul MulNoNan", by_row.product),
    **_ruled("RealDiv DivNoNan Div", by_row.quotient),
    **_ruled("Square", by_row.square),
    **_ruled("SquaredDifference", by_row.squared_difference),
    **_ruled("Maximum Minimum", by_row.bounded),
    **_ruled("Select SelectV2", by_row.chosen),
    **_ruled("Pow Equal NotEqual Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr Atan2 "
             "Xdivy Xlogy Xlog1py FloorDiv FloorMod", by_row.paired),
    **_ruled("Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm", reductions.reduced),
    **_ruled("L2Loss", reductions.half_square),
    **_ruled("Softmax LogSoftmax TopKV2 Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll",
             reductions.along),
    **_ruled("SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
             reductions.entropies),
    **_ruled("RandomShuffle Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2",
             reductions.reordered),
    **_ruled("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum", reductions.matrices),
    **_ruled("Svd Qr MatrixInverse Cholesky MatrixDeterminant LogMatrixDeterminant MatrixSolve "
             "MatrixSolveLs MatrixTriangularSolve SelfAdjointEigV2 Eig MatrixExponential",
             reductions.decomposed),
    **_ruled("Shape Size", pieces.shape),
    **_ruled("Rank LinSpace BroadcastArgs BroadcastGradientArgs", pieces.no_values),
    **_ruled("Range", pieces.numbered),
    **_ruled("StridedSlice Slice", pieces.sliced),
    **_ruled("GatherV2", pieces.gathered),
    **_ruled("TensorScatterUpdate TensorScatterSub TensorScatterMax TensorScatterMin",
             pieces.overwritten),
    **_ruled("Where", pieces.where),
    **_ruled("DynamicPartition", pieces.partitioned),
    **_ruled("ConcatV2", pieces.concatenated),
    **_ruled("Pack", pieces.stacked),
    **_ruled("UnsortedSegmentSum SegmentSum SegmentSumV2 ScatterNd TensorScatterAdd",
             reductions.segments),
    **_ruled("SparseToDense SparseTensorDenseMatMul SparseReduceSum", reductions.of_sparse),
}
