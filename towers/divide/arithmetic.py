"""Rules of arithmetic: element by element, sums over axes, and products of matrices."""

from typing import Any

import tensorflow as tf

from towers.divide.facts import AS_PART, EACH, ONCE, OWN, PART, WHOLE, Each, rows, rows_of
from towers.divide.probes import is_rows, rows_each
from towers.divide.rule import Look, align, contract, kept_axes, rule

# Operations that compute each element from one element.
_UNARY = """Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0e BesselI1e Bitcast Ceil
    ComplexAbs Conj Cos Cosh DebugGradientIdentity Digamma Elu EnsureShape Erf
    Erfc Erfinv Exp Expm1 Floor Imag Inv Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p
    LogicalNot Ndtri OnesLike Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin
    Sinh Softplus Softsign Sqrt Square Tan Tanh"""
# Linear ones among them, which may be applied to parts of a sum.
_LINEAR = "Cast Identity Neg PreventGradient Snapshot StopGradient ZerosLike"
# Operations on the elements at one position of several inputs, after broadcasting.
_BROADCAST = """ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex
    EluGrad Equal FloorDiv FloorMod Greater GreaterEqual Igamma Igammac InvGrad LeakyReluGrad
    LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod MulNoNan NextAfter
    NotEqual Pow ReciprocalGrad Relu6Grad ReluGrad RightShift SeluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference TanhGrad TruncateDiv TruncateMod
    Xdivy Xlog1py Xlogy Zeta"""


@rule(*_UNARY.split())
def each_element(look: Look) -> Each | None:
    """Computes each element from one element."""
    if look.type in ("Bitcast", "EnsureShape") and look.out() != look.dims(0):
        return None
    return look.own_first() if look.fact(0).kind == "rows" else None


@rule(*_LINEAR.split())
def linear_element(look: Look) -> Each | None:
    """Computes each element from one element. Parts of a sum stay parts."""
    if look.fact(0) == PART and look.outputs[0].dtype.is_floating:
        return look.linear()
    return look.own_first() if look.fact(0).kind == "rows" else None


@rule("IdentityN")
def several_identities(look: Look) -> Each | None:
    """Passes each input on."""
    return look.each([OWN if f != ONCE else WHOLE for f in look.facts()], *look.facts())


@rule("RsqrtGrad")
def rsqrt_gradient(look: Look) -> Each | None:
    """Multiplies the gradient by -y^3 / 2."""
    if look.facts() == [EACH, PART]:
        return look.each([OWN, OWN], PART)
    return broadcast_elements(look)


@rule(*_BROADCAST.split())
def broadcast_elements(look: Look) -> Each | None:
    """Computes each element from elements at its position."""
    return align(look, range(len(look.inputs)))


@rule("Add", "AddV2", "Sub", "AddN")
def sums(look: Look) -> Each | None:
    """Adds parts to parts, and rows to rows. A whole value in a loop becomes the first part."""
    facts = set(look.facts())
    if facts == {PART} or look.is_inside and facts == {PART, ONCE}:
        return look.each([AS_PART] * len(look.inputs), PART)
    return broadcast_elements(look)


@rule("Mul", "RealDiv", "Div", "DivNoNan")
def factors(look: Look) -> Each | None:
    """Multiplies parts by a whole value, or divides them by it."""
    facts = look.facts()
    is_factor = [fact in (ONCE, EACH) for fact in facts]
    if (
        facts[0] == PART
        and is_factor[1]
        or look.type == "Mul"
        and is_factor[0]
        and facts[1] == PART
    ):
        return look.each([WHOLE if f == ONCE else OWN for f in facts], PART)
    return broadcast_elements(look)


@rule("Select", "SelectV2")
def choices(look: Look) -> Each | None:
    """Chooses between parts by a whole condition, or between rows."""
    facts = look.facts()
    if PART in facts[1:] and set(facts[1:]) <= {PART, ONCE} and facts[0] == ONCE:
        return look.each([WHOLE, *(OWN if f == PART else AS_PART for f in facts[1:])], PART)
    if look.type == "Select" and len(look.dims(0) or ()) != len(look.out() or ()):
        return None  # a vector chooses rows of matrices: it is not broadcast
    return align(look, range(3))


def _summed_axes(look: Look) -> set[int] | None:
    """Returns the axes of a reduction's first input, or None if they are not known."""
    axes, dims = look.const(1), look.dims(0)
    return None if axes is None or dims is None else kept_axes(dims, axes)


def _axis_after(look: Look, axes: set[int], keeps: bool) -> int:
    """Returns where the axis of rows is after other axes have been removed."""
    axis = look.fact(0).axis
    return axis if keeps else axis - sum(removed < axis for removed in axes)


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def reductions(look: Look) -> Each | None:
    """Reduces each row alone, or sums rows to parts."""
    axes = _summed_axes(look)
    if look.fact(0) == PART:
        return look.linear() if look.type in ("Sum", "Mean") and axes is not None else None
    if axes is None or look.fact(0).kind != "rows":
        return None
    keeps, of_rows = look.attr("keep_dims"), look.fact(0).axis
    ordered = sorted(axes)

    def reduced(context: Any, op: Any, values: list[Any]) -> list[Any]:
        """Takes constant axes: a gradient sums over more axes if a tower has one row."""
        return context.copy(op, [values[0], tf.constant(ordered, tf.int32)], Tidx=tf.int32)

    if of_rows not in axes:
        return look.own_first(rows(_axis_after(look, axes, keeps)), emit=reduced)
    if look.type == "Sum":
        return look.own_first(PART, emit=reduced)
    count = rows_each(look.dims(0)[of_rows])
    if look.type != "Mean" or count is None or not look.outputs[0].dtype.is_floating:
        return None

    def mean(context: Any, op: Any, values: list[Any]) -> list[Any]:
        """sum(a tower's rows) / (number of all rows x other sizes)."""
        total = count * context.place.total
        for axis in ordered:
            if axis != of_rows:
                total *= tf.shape(values[0])[axis]
        found = tf.reduce_sum(values[0], ordered, keepdims=keeps)
        return [found / tf.cast(total, found.dtype)]

    return look.own_first(PART, emit=mean)


@rule("ArgMax", "ArgMin")
def positions(look: Look) -> Each | None:
    """Finds the largest element of each row."""
    axes = _summed_axes(look)
    if axes is None or look.fact(0).kind != "rows" or look.fact(0).axis in axes:
        return None
    return look.own_first(rows(_axis_after(look, axes, False)))


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def running(look: Look) -> Each | None:
    """Accumulates along another axis than the rows' axis."""
    axes = _summed_axes(look)
    if axes is None or look.fact(0).kind != "rows" or look.fact(0).axis in axes:
        return None
    return look.own_first()


@rule("L2Loss")
def squares(look: Look) -> Each | None:
    """Sums squares over all axes."""
    return look.own_first(PART) if look.fact(0).kind == "rows" else None


@rule("MatMul")
def matrix_product(look: Look) -> Each | None:
    """Multiplies two matrices."""
    left = "ki" if look.attr("transpose_a") else "ik"
    right = "jk" if look.attr("transpose_b") else "kj"
    return contract(look, [left, right], "ij")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def batch_matrix_product(look: Look) -> Each | None:
    """Multiplies matrices along the last two axes. Other axes of size 1 have no label of rows."""
    out = look.out()
    if out is None or len(out) > 10:
        return None
    leading = "abcdefgh"[: len(out) - 2]

    def term(i: int, inner: str) -> str:
        dims = look.dims(i) or ()
        labels = leading[len(out) - len(dims) :]
        alone = [
            "ABCDEFGH"[k] if dims[k] != out[k + len(out) - len(dims)] else x
            for k, x in enumerate(labels)
        ]
        return "".join(alone) + inner

    left = term(0, "yx" if look.attr("adj_x") else "xy")
    right = term(1, "zy" if look.attr("adj_y") else "yz")
    return contract(look, [left, right], leading + "xz")


@rule("Einsum")
def einsum(look: Look) -> Each | None:
    """Multiplies and sums as its equation says, without an ellipsis."""
    equation = look.attr("equation").replace(" ", "")
    if "." in equation:
        return None
    left, _, result = equation.partition("->")
    return contract(look, left.split(","), result)


@rule("UnsortedSegmentSum")
def segments(look: Look) -> Each | None:
    """Sums rows to segments that are numbered, as the gradient of a lookup does."""
    ids = look.dims(1)
    if look.fact(0).kind != "rows" or look.fact(0).axis != 0 or ids is None or len(ids) != 1:
        return None
    if look.dims(0) is None or look.dims(0)[0] != ids[0] or look.fact(2) != ONCE:
        return None
    return look.each([rows_of(0), rows_of(0), WHOLE], PART)


# Operations on the last axes of each row, with the number of these axes.
_INNER = {
    "Cholesky": 2, "FFT": 1, "FFT2D": 2, "IFFT": 1, "IFFT2D": 2, "IRFFT": 1,
    "LogMatrixDeterminant": 2, "LogSoftmax": 1, "MatrixBandPart": 2,
    "MatrixDeterminant": 2, "MatrixDiagPartV3": 2,
    "MatrixDiagV3": 1, "MatrixInverse": 2, "RFFT": 1, "Softmax": 1, "TopKV2": 1,
}  # fmt: skip


@rule(*_INNER)
def inner_axes(look: Look) -> Each | None:
    """Computes from the last axes of each row."""
    dims = look.dims(0)
    if look.fact(0).kind != "rows" or dims is None or any(f != ONCE for f in look.facts()[1:]):
        return None
    is_before = look.fact(0).axis < len(dims) - _INNER[look.type]
    return look.own_first() if is_before and is_rows(dims[look.fact(0).axis]) else None
