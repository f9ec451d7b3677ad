"""Holds the rules of TensorFlow's operations on rows of a shard: facts of inputs -> of outputs.

An operation without a rule counts as row by row if its output has a batch axis, else as a fault.
Keras' own layers may combine the rows of a batch (BatchNormalization) without a fault, because they
are known.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import tensorflow as tf

from towers.graph import elements, indexing
from towers.graph.elements import align, row_by_row
from towers.graph.facts import (
    CHOSEN, COMPARES, COUNT, EACH_ROW, MASKED, MIXES, ONE_LENGTH, SHARED, UNKNOWN, Fact, Op,
    has_open_rows, open_axis, sum_over_rows,
)
from towers.machine.user_lines import is_of_keras, is_of_tensorflow


def _named_axes(op: Op, index: int = 1) -> list[int] | None:
    """Returns the axes that input `index` lists, counted from 0; None if it is not constant."""
    rank, axes = op.inputs[0].shape.rank, tf.get_static_value(op.inputs[index])
    return None if axes is None else [
        int(axis) % rank if rank else int(axis) for axis in axes.reshape(-1)
    ]


def reduce(op: Op) -> Fact:
    """Returns the fact of Sum, Mean, Max or another reduction, over listed axes or over all."""
    fact, output, is_linear = op.facts[0], op.output, op.type in ("Sum", "Mean", "L2Loss")
    if op.type == "L2Loss":
        fact = op.multiply(fact, fact)
    if fact.fault:
        return replace(fact, axis=None if output.shape.rank == 0 else fact.axis)
    if fact.parts:
        are_alike = len(set(fact.parts)) == 1 and op.type in ("Max", "Min", "Mean")
        if are_alike or len(fact.parts) == 1:
            return fact.parts[0]
        if op.type == "Prod":
            return functools.reduce(op.multiply, fact.parts)
        return Fact(local=fact.local, degree=0 if fact.degree == 0 else None)
    if not fact.has_rows:
        return fact if is_linear else op.nonlinear(fact)
    axes = None if op.type == "L2Loss" else _named_axes(op)
    if axes is None and open_axis(output) is not None:
        return replace(fact, axis=open_axis(output, fact.axis))
    if axes is None or fact.axis in axes or fact.axis == UNKNOWN and output.shape == ():
        whole = Fact(local=fact.local, degree=fact.degree)
        if op.type == "Mean":
            return whole if fact.each is not None else op.faulty(whole, CHOSEN, MASKED)
        if is_linear:
            return sum_over_rows(fact)
        what = f"takes {op.type} over the rows of the batch"
        return op.faulty(whole, what) if fact.local else Fact(degree=None)
    fact = replace(fact, numbers="")
    result = fact if is_linear or op.type in ("Max", "Min") else op.nonlinear(fact)
    kept = "keep_dims" in op.operation.node_def.attr and op.operation.get_attr("keep_dims")
    if fact.axis is None or fact.axis == UNKNOWN or kept:
        return result
    return replace(result, axis=fact.axis - sum(axis < fact.axis for axis in axes))


def along_axes(op: Op) -> Fact:
    """Returns the fact of Softmax, TopKV2 (last axis), Cumsum, ReverseV2 or Roll (listed axes)."""
    fact, rank = op.facts[0], op.inputs[0].shape.rank
    is_linear = op.type in ("Cumsum", "ReverseV2", "Roll")
    if fact.has_rows and rank is not None:
        names = is_linear or op.type in ("Cumprod", "CumulativeLogsumexp")
        axes = _named_axes(op, 2 if op.type == "Roll" else 1) if names else [rank - 1]
        are_splits = (  # row_splits from lengths
            op.type == "Cumsum" and fact.each is None and op.output.dtype.is_integer
        )
        if (axes is None or fact.axis in axes) and not are_splits:
            return op.faulty(fact, f"({op.type}) {MIXES}")
    return replace(fact, numbers="") if is_linear else op.nonlinear(fact)


def on_last_axes(count: int, op: Op) -> Fact:
    """Returns the fact of operations along the last axes: 1 of FFT, 2 of Svd, 3 of Conv2D.

    Rows are mixed if the batch axis is one of the last `count` axes.
    """
    fact, rank = row_by_row(op), op.inputs[0].shape.rank
    is_mixed = fact.has_rows and rank is not None and any(
        f.axis is not None and f.axis >= rank - count for f in op.facts
    )
    return op.faulty(fact, f"({op.type}) {MIXES}") if is_mixed else fact


def multiply_matrices(op: Op) -> Fact:
    """Returns the fact of MatMul, BatchMatMul or Einsum: products of rows, or their sum."""
    left, right = (*op.facts, SHARED)[:2]  # an Einsum may have one input
    product = op.multiply(left, right)
    if product.fault or not product.has_rows:
        return product
    axes = [fact.axis for fact in op.facts]
    if UNKNOWN in axes or any(v.shape.rank is None for v in op.inputs):
        axis = open_axis(op.output)
        return op.faulty(product, COMPARES) if axis is None else replace(product, axis=axis)
    if op.type == "Einsum":
        equation = op.operation.get_attr("equation").decode().replace(" ", "")
    else:
        names = ("transpose_a", "transpose_b") if op.type == "MatMul" else ("adj_x", "adj_y")
        flips = [-1 if op.operation.get_attr(name) else 1 for name in names]
        equation = f"...{'ik'[::flips[0]]},...{'kj'[::flips[1]]}->...ij"

    def spell_out(term: str, tensor: tf.Tensor) -> str:
        """Replaces an ellipsis by labels, which align at the last axis."""
        count = tensor.shape.rank - len(term.replace("...", ""))
        return term.replace("...", "".join(chr(0x100 + i) for i in range(count, 0, -1)))

    terms, result = equation.split("->")
    spelled = map(spell_out, terms.split(","), op.inputs)
    labels = {term[axis] for term, axis in zip(spelled, axes) if axis is not None}
    if len(labels) > 1:
        return op.faulty(product, COMPARES)
    label, result = labels.pop(), spell_out(result, op.output)
    return replace(product, axis=result.index(label)) if label in result else sum_over_rows(product)


def add_segments(op: Op) -> Fact:
    """Returns the fact of UnsortedSegmentSum, SegmentMax ..., which combine rows by an index."""
    is_tensors, is_segments = op.type.startswith("Tensor"), "Segment" in op.type
    places = (1, 0) if op.type == "ScatterNd" else (2, 1) if is_tensors else (0, 1)
    fact, ids = (op.facts[place] for place in places)
    if not fact.has_rows or fact.fault or ids.fault:
        return row_by_row(op)
    fact = replace(fact, local=fact.local or ids.local, axis=open_axis(op.output))
    if fact.axis is None:
        is_sum = not op.type.rstrip("V2").endswith(("Mean", "Max", "Min", "Prod"))
        return sum_over_rows(fact) if is_sum else op.faulty(fact, f"({op.type}) {MIXES}")
    if is_tensors and fact.axis >= indexing.num_scattered_axes(op):
        return fact
    # Each value goes to the row that it belongs to.
    if ids.has_rows and ids.numbers == "own" or (
            is_segments and is_of_tensorflow(op.inputs[1].op, "ragged/segment_id_ops.py")):
        return replace(fact, each=1)
    return op.faulty(fact, f"({op.type}) {MIXES}")


def reduce_sparse(op: Op) -> Fact:
    """Returns the fact of SparseToDense, SparseTensorDenseMatMul or SparseReduceSum of rows."""
    fact, is_sum = row_by_row(op), op.type == "SparseReduceSum"
    axes = tf.get_static_value(op.inputs[3]) if is_sum else ()
    if fact.fault or axes is None or not fact.has_rows and not is_sum:
        return fact
    indices = op.facts[0]
    if indices.has_rows and indices.each is not None and indices.numbers != "own":
        return op.faulty(fact, f"({op.type}) {MIXES}")
    over_rows = sum_over_rows(replace(op.facts[1], degree=0))
    return over_rows if 0 in axes else replace(fact, axis=0, each=1)


def rescale(op: Op) -> Fact:
    """Returns the fact of FusedBatchNorm or QuantizeAndDequantize, by given statistics or not."""
    is_norm = op.type.startswith("FusedBatchNorm")
    takes_own = is_norm == op.operation.get_attr("is_training" if is_norm else "range_given")
    return op.faulty(row_by_row(op), EACH_ROW) if takes_own and op.facts[0].local else (
        row_by_row(op))


def noise(op: Op) -> Fact:
    """Returns the fact of a tower's noise: rows if its shape has a batch axis, else no row's."""
    is_of_rows = any(fact.has_rows or fact.degree != 0 for fact in op.facts)
    axis = open_axis(op.output) if is_of_rows else None
    return Fact(axis=axis, local=axis is not None)


def call_python(op: Op) -> list[Fact]:
    """Returns the facts of PyFunc or EagerPyFunc, whose Python may do anything with the rows."""
    known = [row_by_row(op, output) for output in op.operation.outputs]
    what = "calls Python (tf.py_function, tf.numpy_function), in a way that towers cannot see into"
    return [op.faulty(fact, what) if fact.local else fact for fact in known]


Rule = Callable[[Op], Fact | list[Fact]]  # a single fact stands for each output

_TABLE: dict[str, Rule] = {
    "Identity StopGradient PreventGradient Snapshot CheckNumerics EnsureShape":
        elements.identity,
    "Neg Real Conj": lambda op: replace(elements.identity(op), numbers=""),
    "IdentityN": lambda op: op.facts,
    "Const": elements.constant,
    "ZerosLike OnesLike": elements.fill_like,
    # one by one
    "Add AddV2 Sub AddN BiasAdd SquaredDifference": elements.add,
    "Mul MulNoNan": lambda op: align(op, op.multiply(op.facts[0], op.facts[1])),
    "RealDiv DivNoNan Div": elements.divide,
    "Square": lambda op: op.multiply(op.facts[0], op.facts[0]),
    "Select SelectV2": elements.select,
    "Maximum Minimum Pow Equal NotEqual Greater GreaterEqual Less LessEqual LogicalAnd "
    "LogicalOr Atan2 Xdivy Xlogy Xlog1py FloorDiv FloorMod": elements.pair,
    # moved, picked, put together
    "Reshape Squeeze ExpandDims Transpose Pad PadV2 MirrorPad": elements.move,
    "MatrixDiagPartV3 MatrixSetDiagV3 MatrixBandPart":
        lambda op: op.facts[0] if op.facts[0].is_value else on_last_axes(2, op),
    "MatrixDiagV3 Diag DiagPart":
        lambda op: op.facts[0] if op.facts[0].is_value else on_last_axes(1, op),
    "BroadcastTo Tile Fill": elements.broadcast,
    "Cast": lambda op: op.nonlinear(op.facts[0]) if (  # it rounds
        op.inputs[0].dtype.is_floating and not op.output.dtype.is_floating) else op.facts[0],
    "RaggedTensorToVariant": lambda op: replace(op.combine(op.facts), each=1),  # a row per example
    "TensorListFromTensor TensorListStack": lambda op: replace(op.facts[0], parts=()),
    "TensorListReserve EmptyTensorList": indexing.reserve,
    "TensorListLength": lambda op: COUNT if op.facts[0].axis == 0 else SHARED,
    "TensorListGetItem": indexing.get_item,
    "TensorListSetItem TensorListPushBack": indexing.set_item,
    "StridedSlice Slice": indexing.take_slice,
    "GatherV2": indexing.gather,
    "RaggedGather": indexing.gather_ragged,
    "GatherNd": indexing.gather_nd,
    "TensorScatterUpdate TensorScatterSub TensorScatterMax TensorScatterMin": indexing.overwrite,
    "Where": elements.choose,
    "DynamicPartition": lambda op: replace(
        op.combine(op.facts), numbers=op.facts[0].numbers,
        each=None if op.facts[0].has_rows else 1),
    "DynamicStitch ParallelDynamicStitch":
        lambda op: op.faulty(row_by_row(op), f"({op.type}) {MIXES}"),
    "ConcatV2": elements.concat,
    "Pack": elements.stack,
    "Unpack": elements.unstack,
    "Split SplitV": elements.split,
    # numbers
    "Shape Size": elements.shape,
    "Rank LinSpace BroadcastArgs BroadcastGradientArgs": lambda op: SHARED,
    "Range": elements.count_up,
    # along axes
    "Sum Mean Max Min Prod All Any ArgMax ArgMin EuclideanNorm L2Loss": reduce,
    "Softmax LogSoftmax TopKV2 Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll": along_axes,
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits FFT IFFT RFFT IRFFT":
        functools.partial(on_last_axes, 1),
    "Bincount DenseBincount": lambda op: row_by_row(op) if op.facts[0].numbers == "own" else (
        on_last_axes(1, op)),
    "Svd Qr MatrixInverse Cholesky MatrixDeterminant LogMatrixDeterminant MatrixSolve "
    "MatrixSolveLs MatrixTriangularSolve SelfAdjointEigV2 Eig MatrixExponential "
    "FFT2D IFFT2D RFFT2D IRFFT2D": functools.partial(on_last_axes, 2),
    "Conv2D DepthwiseConv2dNative MaxPool MaxPoolV2 AvgPool Dilation2D ExtractImagePatches "
    "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToDepth DepthToSpace":
        functools.partial(on_last_axes, 3),
    "Conv3D MaxPool3D AvgPool3D": functools.partial(on_last_axes, 4),
    "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 QuantizeAndDequantizeV2 "
    "QuantizeAndDequantizeV3 QuantizeAndDequantizeV4": rescale,
    "RandomShuffle Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2":  # along the first axis
        lambda op: op.faulty(op.facts[0], f"({op.type}) {MIXES}") if op.facts[0].has_rows else (
            row_by_row(op)),
    "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum": multiply_matrices,
    "UnsortedSegmentSum SegmentSum SegmentSumV2 ScatterNd TensorScatterAdd SegmentMean SegmentMax "
    "SegmentMaxV2 SegmentMin SegmentMinV2 SegmentProd SegmentProdV2 UnsortedSegmentMax "
    "UnsortedSegmentMin UnsortedSegmentProd": add_segments,
    "SparseReorder": lambda op: op.facts[:2],
    "SparseToDense SparseTensorDenseMatMul SparseReduceSum": reduce_sparse,
    # each tower draws its classes: candidates, expected counts of labels and of candidates
    "UniformCandidateSampler LogUniformCandidateSampler FixedUnigramCandidateSampler "
    "LearnedUnigramCandidateSampler AllCandidateSampler":
        lambda op: [SHARED, op.facts[0], SHARED],
    "PyFunc EagerPyFunc PyFuncStateless": call_python,
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
_BY_INDEX = ("RaggedGather", "Bincount", "DenseBincount")  # these may put rows into another order


def forgive(op: Op, fact: Fact) -> Fact:
    """Removes the faults that Keras' own layers, its losses and ragged tensors have by design."""
    if fact.fault is None or fact.fault.operation is not op.operation:
        return fact
    is_condition = op.type in ("If", "StatelessIf")
    strides = tf.get_static_value(op.inputs[3]) if op.type == "StridedSlice" else None
    is_reversed = strides is not None and bool((strides < 0).any())
    is_index = not (op.output.dtype.is_floating or op.type in _BY_INDEX or is_reversed)
    # Hinge losses test whether all labels are 0 or 1. The result for a shard serves as well.
    # Ragged operations compare and look up the ends of rows. CTC scatters a row's labels to it.
    if is_condition and is_of_keras(op.operation, "losses") or (
            is_condition or is_index) and is_of_tensorflow(op.operation, "ragged/") or (
            op.type == "ScatterNd" and is_of_tensorflow(op.operation, "ctc_ops.py")):
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
    is_padded = any(f.padded for f in op.facts)
    if any(f.masks for f in op.facts) or is_padded and op.type in _MASKS:
        return replace(fact, masks=True)
    if not is_padded:
        return fact
    begin = tf.get_static_value(op.inputs[1]) if op.type == "StridedSlice" else None
    takes_the_last = begin is not None and bool((begin < 0).any())  # as x[:, -1] does
    if (op.type in _OF_LENGTHS or takes_the_last) and not fact.fault and not fact.is_value:
        what = "computes with padding, as long as the longest row of the batch"
        return op.faulty(fact, what, ONE_LENGTH)
    return replace(fact, padded=fact.has_rows and has_open_rows(output))
