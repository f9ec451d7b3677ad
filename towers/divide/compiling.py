"""Says what XLA compiles: the update, and stages of small loops on machines without GPUs."""

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from towers.divide.context import reads
from towers.divide.facts import Need, Op, Value
from towers.divide.flat import CONDITIONS, LOOPS, is_noise
from towers.divide.repeatable import all_operations
from towers.machine.tensorflow_internals import called_graphs

# XLA knows many more, but some of them only on some devices.
_KNOWN = frozenset(
    """
    Abs Add AddN AddV2 All Any ArgMax ArgMin AssignAddVariableOp AssignSubVariableOp
    AssignVariableOp Atan2 AvgPool AvgPoolGrad BatchMatMulV2 BiasAdd BiasAddGrad Bitcast
    BitwiseAnd BitwiseOr BitwiseXor BroadcastArgs BroadcastGradientArgs BroadcastTo Cast Ceil
    ClipByValue ConcatV2 Const Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D Cos Cosh
    Cumsum DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
    DepthwiseConv2dNativeBackpropInput Div DivNoNan Einsum Elu EluGrad EmptyTensorList Equal Erf
    Erfc Exp ExpandDims Expm1 Fill Floor FloorDiv FloorMod GatherNd GatherV2 Greater
    GreaterEqual Identity Invert IsFinite IsNan L2Loss LeakyRelu LeakyReluGrad LeftShift Less
    LessEqual Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr MatMul Max MaxPool
    MaxPoolGrad Maximum Mean Min Minimum Mul MulNoNan Neg NoOp NotEqual OneHot OnesLike Pack Pad
    PadV2 Placeholder Pow PreventGradient Prod Range ReadVariableOp RealDiv Reciprocal
    ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Reshape ReverseV2 RightShift Round Rsqrt
    RsqrtGrad Select SelectV2 Selu SeluGrad Shape Sigmoid SigmoidGrad Sign Sin Sinh Size Slice
    Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign
    SparseSoftmaxCrossEntropyWithLogits Split Sqrt SqrtGrad Square SquaredDifference Squeeze
    StatelessRandomUniformV2 StopGradient StridedSlice StridedSliceGrad Sub Sum Tan Tanh
    TanhGrad TensorListElementShape TensorListFromTensor TensorListGetItem TensorListLength
    TensorListPopBack TensorListPushBack TensorListReserve TensorListSetItem TensorListStack
    Tile TopKV2 Transpose Unpack UnsortedSegmentSum Xdivy Xlogy ZerosLike
""".split()
)
_BODIES = ("body", "cond", "then_branch", "else_branch")


def is_known(operation: tf.Operation) -> bool:
    """Returns whether XLA compiles an operation of the trace, and what it calls."""
    # XLA has no strings.
    if any(value.dtype == tf.string for value in (*operation.inputs, *operation.outputs)):
        return False
    if operation.type not in (*LOOPS, *CONDITIONS):
        return operation.type in _KNOWN
    # XLA compiles a loop only if it compiles all of its functions.
    names = [name for name in _BODIES if name in operation.node_def.attr]
    graphs = [graph for name in names for graph in called_graphs(operation, name)]
    return len(graphs) == len(names) and all(
        is_known(each) for graph in graphs for each in graph.get_operations()
    )


def compiles(ops: Sequence[Op], ends: Iterable[Value]) -> bool:
    """Returns whether XLA can compile a stage: it knows all operations, and no list leaves it.

    ends: the values that the stage reads and returns.
    """
    if any(value.dtype == tf.variant for value in ends):
        return False
    return all(is_known(op.source) for op in ops)


def is_worth_it(ops: Sequence[Op], ends: Iterable[Value]) -> bool:
    """Returns whether a stage has a loop, and sizes that stay, but for the number of rows.

    XLA compiles again for each length of sequences.
    """
    sizes = [
        size for value in ends
        for axis, size in enumerate(value.shape if value.shape.rank is not None else [None])
        if not value.fact.has_rows or value.fact.axis != axis
    ]  # fmt: skip
    loops = [op.source for op in ops if op.type in LOOPS]
    return bool(loops) and not any(map(draws_from_seed, loops)) and None not in sizes


def noise_of(ops: Sequence[Op]) -> set[Op]:
    """Returns the operations of a stage that draw noise, and those that they follow from."""
    noise: set[Op] = set()
    wanted: set[Value] = set()
    for op in reversed(ops):
        if draws_from_seed(op.source) or not wanted.isdisjoint(op.outputs):
            noise.add(op)
            wanted.update(value for value, _ in reads(op))
    return noise


def draws_from_seed(operation: tf.Operation) -> bool:
    """Returns whether an operation draws noise from a seed, for which XLA has other numbers."""
    return any(is_noise(op.type) for op in all_operations([operation]))


def indices_are_valid(ops: Sequence[Op], read: Callable[[Value, Need], tf.Tensor]) -> tf.Tensor:
    """Returns whether all indices of a stage are in their range, as a bool.

    Kernels raise an error otherwise. XLA reads another row, or makes a loss NaN.
    """
    checks = [tf.constant(True)]
    for op in ops:
        size, needs = _range_of_indices(op), dict(op.in_towers.needs if op.in_towers else ())
        if size is not None and op.inputs[1] in needs:
            index = read(op.inputs[1], needs[op.inputs[1]])
            checks.append(tf.reduce_all((index >= 0) & (index < tf.cast(size, index.dtype))))
    return tf.reduce_all(tf.stack(checks))


def _range_of_indices(op: Op) -> int | None:
    """Returns the number that each index in an operation's second input must be below, if any."""
    if op.type == "SparseSoftmaxCrossEntropyWithLogits":
        logits = op.inputs[0]  # TensorFlow joins all axes but the last one
        return (logits.op.inputs[0] if logits.op.type == "Reshape" else logits).shape[-1]  # type: ignore[no-any-return]
    axis = tf.get_static_value(op.source.inputs[2]) if op.type == "GatherV2" else None
    if axis is None:
        return None
    return op.inputs[0].shape[int(axis)]  # type: ignore[no-any-return]
