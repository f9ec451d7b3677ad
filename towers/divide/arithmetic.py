"""Rules of arithmetic: element by element, sums over axes, and products of matrices."""

from collections.abc import Sequence

import tensorflow as tf

from towers.divide.context import Context
from towers.divide.facts import (
    AS_PART,
    EACH,
    ONCE,
    OWN,
    PART,
    WHOLE,
    Each,
    Fact,
    Op,
    Tensors,
    rows,
    rows_of,
)
from towers.divide.probes import rows_each
from towers.divide.rule import Dims, Look, align, contract, kept_axes, rule, rule_of_rows

# Operations that compute each element from one element.
_UNARY = """Abs Acos Acosh Angle AsString Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1
    BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bitcast
    Bucketize Ceil ComplexAbs Conj Cos Cosh Dawsn DebugGradientIdentity Digamma Elu
    EnsureShape Erf Erfc Erfinv Exp Expint Expm1 Floor FresnelCos FresnelSin Imag Inv
    Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p LogicalNot Ndtri OnesLike
    Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus
    Softsign Spence Sqrt Square StaticRegexReplace StringLength StringLower StringStrip
    StringToHashBucketFast StringToHashBucketStrong StringUpper Tan Tanh"""
# Linear ones among them, which may be applied to parts of a sum.
_LINEAR = "Identity Neg PreventGradient Snapshot StopGradient ZerosLike"
# Operations on the elements at one position of several inputs, after broadcasting.
_BROADCAST = """ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex
    EluGrad Equal FloorDiv FloorMod Greater GreaterEqual Igamma Igammac InvGrad LeakyReluGrad
    LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod MulNoNan NextAfter
    NotEqual Polygamma Pow ReciprocalGrad Relu6Grad ReluGrad RightShift SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference TanhGrad TruncateDiv TruncateMod
    Xdivy Xlog1py Xlogy Zeta"""


@rule_of_rows(*_UNARY.split())
def each_element(look: Look) -> Each | None:
    """Computes each element from one element."""
    return look.own_first()


@rule_of_rows(*_LINEAR.split(), is_linear=True)
def linear_element(look: Look) -> Each | None:
    """Computes each element from one element. Parts of a sum stay parts."""
    return look.own_first()


@rule("Cast")
def cast(look: Look) -> Each | None:
    """Converts each element from one element. A sum is made before it is converted.

    In float64 it may cancel, in float16 it may be infinite, and in uint8 it begins again at 0. Only
    bfloat16 loses nothing: float32 has all its numbers and no larger ones.
    """
    if look.fact(0).kind == "rows":
        return look.own_first()
    types = look.inputs[0].dtype, look.outputs[0].dtype
    if look.fact(0) == PART and types == (tf.bfloat16, tf.float32):
        return look.own_first()
    return None


@rule("RsqrtGrad")
def rsqrt_gradient(look: Look) -> Each | None:
    """Multiplies the gradient by -y^3 / 2."""
    if look.facts() == [EACH, PART]:
        return look.each([OWN, OWN], PART)
    return broadcast_elements(look)


@rule(*_BROADCAST.split())
def broadcast_elements(look: Look) -> Each | None:
    """Computes each element from elements at its position."""
    return align(look)


@rule("Add", "AddV2", "Sub", "AddN")
def sums(look: Look) -> Each | None:
    """Adds parts to parts, and rows to rows. A whole value in a loop becomes the first part."""
    facts = set(look.facts())
    if facts == {PART} or look.is_inside and facts == {PART, ONCE}:
        return look.each([AS_PART] * len(look.inputs), PART)
    return align(look)


@rule("Mul", "RealDiv", "Div", "DivNoNan")
def factors(look: Look) -> Each | None:
    """Multiplies parts by a whole value, or divides them by it. Quotients of integers are cut."""
    facts = look.facts()
    # The sum of rounded quotients is not the rounded quotient of the sum.
    is_exact = look.type == "Mul" or not look.outputs[0].dtype.is_integer
    is_factor = [fact in (ONCE, EACH) for fact in facts]
    # A part in the denominator, or a product of two parts, makes no parts. Divided by 0, parts
    # may be infinities that cancel, and a tower with a sum of 0 makes a NaN.
    is_safe = look.type == "Mul" or look.is_size(1) or facts[1] == EACH or look.is_inside
    is_quotient = facts[0] == PART and is_factor[1] and is_exact and is_safe
    if is_quotient or look.type == "Mul" and is_factor[0] and facts[1] == PART:
        return look.each([WHOLE if f == ONCE else OWN for f in facts], PART)
    return align(look)


@rule("Select", "SelectV2")
def choices(look: Look) -> Each | None:
    """Chooses between parts by a whole condition, or between rows."""
    facts = look.facts()
    if facts[0] == ONCE and set(facts[1:]) in ({PART}, {PART, ONCE}):
        return look.each([WHOLE, AS_PART, AS_PART], PART)
    if look.type == "Select" and len(look.dims(0)) != len(look.out()):
        return None  # a vector chooses rows of matrices: it is not broadcast
    return align(look)


def _axes(look: Look) -> list[int]:
    """Returns the axes of a reduction. If they were not known, nor were the sizes of the result."""
    return sorted(kept_axes(look.dims(0), look.const(1)))


def _axis_after(look: Look, axes: Sequence[int], keeps: bool) -> int:
    """Returns where the axis of rows is after other axes have been removed."""
    axis = look.fact(0).axis
    if keeps:
        return axis
    return axis - sum(removed < axis for removed in axes)


def _reduction(look: Look, over_rows: Fact | None = None) -> Each | None:
    """Answers for a reduction of each row alone. over_rows: the result's fact if it is over rows.

    Towers take constant axes: a gradient sums over more axes if a tower has one row.
    """
    axes, keeps = _axes(look), look.attr("keep_dims")

    def emit(context: Context, op: Op, values: Tensors) -> Tensors:
        return context.copy(op, [values[0], tf.constant(axes, tf.int32)], Tidx=tf.int32)

    fact = over_rows
    if look.fact(0).axis not in axes:
        fact = rows(_axis_after(look, axes, keeps))
    if fact is None:
        return None
    return Each([(look.inputs[0], OWN)], [fact], emit)


@rule_of_rows("Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def reductions(look: Look) -> Each | None:
    """Reduces each row alone."""
    return _reduction(look)


@rule_of_rows("Sum", is_linear=True)
def totals(look: Look) -> Each | None:
    """Sums each row alone, or the rows to parts."""
    return _reduction(look, PART)


@rule_of_rows("Mean", is_linear=True)
def mean(look: Look) -> Each | None:
    """Averages each row alone, or the rows to parts: sum(a tower's rows) / (all elements)."""
    axes, of_rows, keeps = _axes(look), look.fact(0).axis, look.attr("keep_dims")
    if of_rows not in axes:
        return _reduction(look)
    count = rows_each(look.dims(0)[of_rows])
    if count is None or not look.outputs[0].dtype.is_floating:
        return None

    def part(context: Context, op: Op, values: Tensors) -> Tensors:
        total, shape = tf.cast(count * context.place.total, tf.int64), values[0].shape
        for axis in axes:
            if axis != of_rows:
                total *= shape[axis] or tf.shape(values[0], tf.int64)[axis]
        found = tf.reduce_sum(values[0], axes, keepdims=keeps)
        return [found / tf.cast(total, found.dtype)]

    return Each([(look.inputs[0], OWN)], [PART], part)


@rule_of_rows("ArgMax", "ArgMin")
def positions(look: Look) -> Each | None:
    """Finds the largest element of each row."""
    if look.const(1) is None:
        return None
    axes = _axes(look)
    if look.fact(0).axis in axes:
        return None
    look.outputs[0].below = look.dims(0)[next(iter(axes))]
    return look.own_first(rows(_axis_after(look, axes, False)))


@rule_of_rows("Cumsum", "Cumprod", "CumulativeLogsumexp")
def running(look: Look) -> Each | None:
    """Accumulates along another axis than the rows' axis."""
    axes = look.const(1)
    if axes is None or look.fact(0).axis in kept_axes(look.dims(0), axes):
        return None
    return look.own_first()


@rule_of_rows("L2Loss")
def squares(look: Look) -> Each | None:
    """Sums squares over all axes."""
    return look.own_first(PART)


@rule("MatMul")
def matrix_product(look: Look) -> Each | None:
    """Multiplies two matrices."""
    left = "ki" if look.attr("transpose_a") else "ik"
    right = "jk" if look.attr("transpose_b") else "kj"
    return contract(look, [left, right], "ij")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matrix_product(look: Look) -> Each | None:
    """Multiplies matrices along the last two axes."""
    leading = look.out()[:-2]

    def term(i: int, inner: str) -> list[object]:
        return [*_broadcast(i, look.dims(i)[:-2], leading), *inner]

    left = term(0, "yx" if look.attr("adj_x") else "xy")
    right = term(1, "zy" if look.attr("adj_y") else "yz")
    return contract(look, [left, right], [*range(len(leading)), "x", "z"])


@rule("Einsum")
def einsum(look: Look) -> Each | None:
    """Multiplies and sums as its equation says. An ellipsis stands for axes that are broadcast."""
    left, _, result = look.attr("equation").replace(" ", "").partition("->")
    whole = _behind(result, look.out())

    def labels(i: int, term: str) -> list[object]:
        before, _, after = term.partition("...")
        return [*before, *_broadcast(i, _behind(term, look.dims(i)), whole), *after]

    terms = [labels(i, term) for i, term in enumerate(left.split(","))]
    before, _, after = result.partition("...")
    return contract(look, terms, [*before, *range(len(whole)), *after])


def _behind(term: str, dims: Dims) -> Dims:
    """Returns the axes that the ellipsis of an equation's term stands for; none without one."""
    before, _, after = term.partition("...")
    return dims[len(before) : len(dims) - len(after)]


def _broadcast(i: int, dims: Dims, whole: Dims) -> list[object]:
    """Returns labels of axes that are broadcast to `whole`: the axes there.

    An axis of size 1 has a label that no other one has.
    """
    axes = range(len(whole))[len(whole) - len(dims) :]
    return [a if dims[k] == whole[a] else ("one", i, a) for k, a in enumerate(axes)]


# Operations on the last axes of each row, with the number of these axes.
_INNER = {
    "Cholesky": 2, "FFT": 1, "FFT2D": 2, "FFT3D": 3, "IFFT": 1, "IFFT2D": 2, "IFFT3D": 3,
    "IRFFT": 1, "IRFFT2D": 2, "LogMatrixDeterminant": 2, "LogSoftmax": 1, "Lu": 2,
    "MatrixBandPart": 2, "MatrixDeterminant": 2, "MatrixDiagPartV3": 2, "MatrixInverse": 2, "MatrixSquareRoot": 2, "Qr": 2, "RFFT": 1, "RFFT2D": 2,
    "SelfAdjointEigV2": 2, "Softmax": 1, "Svd": 2, "TopKV2": 1,
}  # fmt: skip


@rule_of_rows("MatrixDiagV3")
def diagonals(look: Look) -> Each | None:
    """Makes matrices of their diagonals."""
    sizes = [dim[0] if len(set(dim)) == 1 else None for dim in look.dims(0)]
    if look.fact(0).axis == len(sizes) - 1:
        return None

    def make(context: Context, op: Op, values: Tensors) -> Tensors:
        # TensorFlow takes a known number of rows, but not for a diagonal of unknown length.
        return context.copy(op, [tf.ensure_shape(values[0], sizes), *values[1:]])

    return look.own_first(emit=make)


# Operations on matrices and the last axes of a second input, with the number of these.
_BESIDE_MATRICES = {"MatrixSetDiagV3": 1, "MatrixSolve": 2, "MatrixTriangularSolve": 2}


@rule_of_rows(*_INNER)
def inner_axes(look: Look) -> Each | None:
    """Computes from the last axes of each row."""
    fact = look.fact(0)
    if fact.axis >= len(look.dims(0)) - _INNER[look.type]:
        return None
    if look.type == "TopKV2":
        look.outputs[1].below = look.dims(0)[-1]
    # Eigenvectors that nobody asked for are an empty tensor, and so is the sum of empty ones.
    facts = [fact if set(look.out(i)[0]) != {0} else PART for i in range(len(look.outputs))]
    return look.each([OWN, *[WHOLE] * len(look.inputs[1:])], *facts)


@rule(*_BESIDE_MATRICES)
def with_matrices(look: Look) -> Each | None:
    """Computes from a matrix of each row, and what the second input has for it."""
    axis = next((fact.axis for fact in look.facts()[:2] if fact.kind == "rows"), None)
    leading = look.dims(0)[:-2]
    if axis is None or axis >= len(leading):
        return None
    if leading != look.dims(1)[: -_BESIDE_MATRICES[look.type]]:
        return None
    return look.each([rows_of(axis), rows_of(axis), *[WHOLE] * len(look.inputs[2:])], rows(axis))
