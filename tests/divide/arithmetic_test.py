"""Every rule of arithmetic.py by itself: whole and divided among towers."""

from collections.abc import Callable
from functools import partial

import pytest
import tensorflow as tf

from tests.divide.whole_and_divided import (
    N3,
    N34,
    R,
    T3N4,
    Cases,
    assert_alike,
    gradient_of,
    kinds_without,
    raw,
)
from towers.divide import arithmetic
from towers.divide.rule import RULES

CASES = Cases()
add, add_once = CASES.add, CASES.add_once


def _letters(kind: str, x: tf.Tensor) -> tf.Tensor:
    """Returns numbers that follow from what an operation makes of texts."""
    texts = tf.strings.as_string(x)
    functions = {
        "StaticRegexReplace": lambda: tf.strings.regex_replace(texts, "[.]", ","),
        "StringLength": lambda: tf.strings.length(texts),
        "StringLower": lambda: tf.strings.lower(texts),
        "StringStrip": lambda: tf.strings.strip(texts),
        "StringToHashBucketStrong": lambda: tf.strings.to_hash_bucket_strong(texts, 9, [1, 2]),
        "StringUpper": lambda: tf.strings.upper(texts),
    }
    found = functions.get(kind, lambda: texts)()
    return tf.strings.to_hash_bucket_fast(found, 1000) if found.dtype == tf.string else found


def _complexes(kind: str, x: tf.Tensor) -> tf.Tensor:
    z = tf.complex(x, x * x)
    functions = {"Angle": tf.math.angle, "ComplexAbs": tf.abs, "Conj": tf.math.conj,
                 "Imag": tf.math.imag, "Real": tf.math.real}  # fmt: skip
    found = functions[kind](tf.cast(z, tf.complex64))  # no other type has all kernels
    return tf.math.real(found) if kind == "Conj" else found


def _bytes(x: tf.Tensor) -> tf.Tensor:
    """Returns bytes, of which six or more add up to a sum that begins again at 0."""
    return tf.cast(x * 0 + 50, tf.uint8)


def _halves(x: tf.Tensor) -> tf.Tensor:
    """Returns float16 numbers, of which three or more add up to infinity."""
    return tf.cast(x * 0 + 30_000, tf.float16)


def _sum_of_bfloat16(x: tf.Tensor) -> tf.Tensor:
    """Returns a sum that bfloat16 does not round."""
    return tf.reduce_sum(tf.cast(tf.round(tf.clip_by_value(x, -3, 3)), tf.bfloat16), 0)


def _integers(kind: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return getattr(R, kind)(x=tf.cast(x, tf.int32), y=tf.cast(y, tf.int32) + 1)


UNARY = {
    "above_one": "Acosh",
    "positive": """BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e
        BesselK1 BesselK1e BesselY0 BesselY1 Dawsn Digamma Expint FresnelCos FresnelSin Inv Lgamma
        Log Log1p Reciprocal Rsqrt Spence Sqrt""",
    "unit": "Acos Asin Atanh Erfinv",
    "probability": "Ndtri",
    "normal": """Abs Asinh Atan Ceil Cos Cosh Elu Erf Erfc Exp Expm1 Floor IsFinite IsInf IsNan
        OnesLike Relu Relu6 Rint Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Square Tan
        Tanh Neg Snapshot StopGradient ZerosLike Identity DebugGradientIdentity PreventGradient""",
}
for fill, kinds in UNARY.items():
    for kind in kinds.split():
        add(kind, raw(kind), N3, fill=fill)
        add(kind, raw(kind), T3N4, fill=fill)
add("EnsureShape", lambda x: tf.ensure_shape(x, [None, 3]), N3)
add("Bitcast", lambda x: tf.bitcast(x, tf.int64), N3)
add("Bitcast", lambda x: tf.bitcast(x, tf.int32), N3, divided=None)
add("Cast", lambda x: tf.cast(x, tf.float32), N3)
add_once("Cast", lambda x: tf.cast(tf.reduce_sum(x, 0), tf.float32), N3)
add_once("Cast", lambda x: tf.cast(tf.reduce_sum(_bytes(x), 0), tf.float64), N3, extremes=())
add_once("Cast", lambda x: 1 / tf.cast(tf.reduce_sum(_halves(x), 0), tf.float32), N3, extremes=())
add(
    "Snapshot",
    lambda x: R.Snapshot(input=tf.cast(_sum_of_bfloat16(x), tf.float32)),
    N3,
    extremes=(),
)
add("LeakyRelu", raw("LeakyRelu"), N3)
add("Invert", lambda x: R.Invert(x=tf.cast(x, tf.int32)), N3)
add("LogicalNot", lambda x: tf.logical_not(x > 0), N3)
add("Bucketize", lambda x: R.Bucketize(input=x, boundaries=[-0.5, 0.0, 1.0]), N3)
for kind in """AsString StaticRegexReplace StringLength StringLower StringStrip
        StringToHashBucketFast StringToHashBucketStrong StringUpper""".split():
    add(kind, partial(_letters, kind), N3)
for kind in ("Angle", "ComplexAbs", "Conj", "Imag", "Real"):
    add(kind, partial(_complexes, kind), N3)


BINARY = {
    "normal": """ApproximateEqual Atan2 Equal Greater GreaterEqual Less LessEqual
        Maximum Minimum NotEqual SquaredDifference Add AddV2 Sub Mul ReluGrad Relu6Grad EluGrad
        SeluGrad LeakyReluGrad SigmoidGrad SoftplusGrad SoftsignGrad TanhGrad MulNoNan DivNoNan""",
    "positive": """Div FloorDiv FloorMod Igamma Igammac InvGrad Mod NextAfter Pow RealDiv
        ReciprocalGrad RsqrtGrad SqrtGrad TruncateMod Xdivy Xlog1py Xlogy""",
    "above_one": "Zeta",
}
SAME_SHAPE = """ApproximateEqual ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SigmoidGrad
    SoftplusGrad SoftsignGrad TanhGrad InvGrad ReciprocalGrad RsqrtGrad SqrtGrad""".split()
for fill, kinds in BINARY.items():
    for kind in kinds.split():
        add(kind, raw(kind), N3, N3, fill=fill)
        if kind not in SAME_SHAPE:
            add(kind, raw(kind), N3, (3,), fill=fill)
            add(kind, raw(kind), (3, 1, 4), T3N4, fill=fill)
            add(kind, raw(kind), ("n", 1), (1, "n"), fill=fill)  # every row with every row
for kind in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "TruncateDiv"):
    add(kind, partial(_integers, kind), N3, N3, fill="labels")
for other in (N3, (3,)):
    add("Polygamma", lambda a, x: R.Polygamma(a=tf.floor(a), x=x), N3, other, fill="above_one")


add("LogicalAnd", lambda x, y: (x > 0) & (y > 0), N3, N3)
add("LogicalOr", lambda x, y: (x > 0) | (y > 0), N3, (3,))
add("Complex", lambda x, y: tf.math.real(tf.complex(x, y) * 2), N3, N3)
add(
    "ClipByValue",
    lambda x: R.ClipByValue(
        t=x, clip_value_min=tf.constant(-1.0, x.dtype), clip_value_max=tf.constant(1.0, x.dtype)
    ),
    N3,
)
add("AddN", lambda x, y, z: R.AddN(inputs=[x, y, z]), N3, N3, N3)
add("AddN", lambda x, y: R.AddN(inputs=[tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)]), N3, N3)
add("AddV2", lambda x, y: tf.reduce_sum(x, 0) + tf.reduce_sum(y, 0), N3, N3)
add_once("AddV2", lambda x, y: tf.reduce_sum(x, 0) + y, N3, (3,))
# Towers read these products: others are made once, of the sum of the parts.
add("Mul", lambda x, y: tf.reduce_sum(tf.reduce_sum(x, 0) * y), N3, (3,))
add("Mul", lambda x, y: tf.reduce_sum(x, 0) * tf.reduce_sum(y, 0), N3, N3, divided=None)
add_once("RealDiv", lambda x, y: y / tf.reduce_sum(x, 0), N3, (3,))
# Divided by 0, the parts of this sum would be infinities of both signs.
add_once(
    "RealDiv",
    lambda x, y: tf.exp(-tf.abs(tf.reduce_sum(x, 0) / (y * 0) + tf.reduce_sum(x * x, 0))),
    N3,
    (3,),
    extremes=(),
)
add_once("ArgMax", lambda x, y: tf.argmax(x[:, 0], tf.cast(y[0] * 0, tf.int32)), N3, (3,))
add("Select", lambda x, y: R.Select(condition=x > 0, x=x, y=y), N3, N3)
add("Select", lambda c, x: R.Select(condition=c > 0, x=x, y=-x), ("n",), N3, divided=None)
add("SelectV2", lambda x, y: tf.where(x > 0, x, y), N3, (3,))
add("SelectV2", lambda x, y: tf.where(y > 0, tf.reduce_sum(x, 0), y), N3, (3,))

# The rule of Square does not hold for parts: (a + b)^2 is not a^2 + b^2.
add_once("Square", lambda x: tf.square(tf.reduce_sum(x, 0)), N3)
add_once("Sqrt", lambda x: tf.sqrt(tf.reduce_sum(x, 0)), N3, fill="positive")

for kind, make in {
    "Sum": tf.reduce_sum,
    "Mean": tf.reduce_mean,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Prod": tf.reduce_prod,
    "All": lambda x, axis: tf.reduce_all(x > 0, axis),
    "Any": lambda x, axis: tf.reduce_any(x > 0, axis),
    "EuclideanNorm": tf.math.reduce_euclidean_norm,
}.items():
    sums_rows = kind in ("Sum", "Mean")
    add(kind, partial(make, axis=1), N34)
    add(kind, partial(make, axis=-1), T3N4)
    add(kind, partial(make, axis=0), N34, divided=sums_rows)
    add(kind, partial(make, axis=[0, 1]), T3N4, divided=sums_rows)
    if kind not in ("All", "Any"):
        add(kind, partial(make, axis=0, keepdims=True), N34, divided=sums_rows)
add("Mean", lambda x: tf.reduce_mean(tf.reshape(x, [-1, 4])), N34)
add("Sum", lambda x: tf.reduce_sum(tf.reduce_sum(x, 0), 0), N34)
for kind, make in {"ArgMax": tf.argmax, "ArgMin": tf.argmin}.items():
    add(kind, partial(make, axis=1), N34)
    add_once(kind, partial(make, axis=0), N34)
for kind, make in {
    "Cumsum": tf.cumsum,
    "Cumprod": tf.math.cumprod,
    "CumulativeLogsumexp": tf.math.cumulative_logsumexp,
}.items():
    add(kind, partial(make, axis=1), N34)
    add_once(kind, partial(make, axis=0), N34)
add("L2Loss", tf.nn.l2_loss, N3)

add("MatMul", lambda x, w: x @ w, N3, (3, 2))
add("MatMul", lambda x, w: tf.matmul(w, x, transpose_b=True), N3, (2, 3))
add("MatMul", lambda x, y: tf.matmul(x, y, transpose_a=True), N3, N3)
add("MatMul", lambda x, y: tf.matmul(x, y, transpose_b=True), N3, N3)
add("MatMul", lambda x, w: tf.reduce_sum(x[:, :, None] * x[:, None], 0) @ w, N3, (3, 2))
for kind in ("BatchMatMul", "BatchMatMulV2"):
    add(kind, (lambda k: lambda x, y: getattr(R, k)(x=x, y=y, adj_y=True))(kind), N34, N34)
add("BatchMatMulV2", lambda x, y: R.BatchMatMulV2(x=x, y=y), N34, (1, 4, 2))
add("BatchMatMulV2", lambda x, y: R.BatchMatMulV2(x=x, y=y, adj_x=True), T3N4, T3N4)
add("BatchMatMulV2", lambda x, y: R.BatchMatMulV2(x=x, y=y, adj_y=True), T3N4, T3N4)
add("BatchMatMulV3", lambda x, y: R.BatchMatMulV3(x=x, y=y, Tout=tf.float64, adj_y=True), N34, N34)
add("Einsum", lambda x, w: R.Einsum(inputs=[x, w], equation="ntd,de->nte"), N34, (4, 2))
add("Einsum", lambda x, y: R.Einsum(inputs=[x, y], equation="ntd,nte->de"), N34, ("n", 3, 2))
add("Einsum", lambda x, y: R.Einsum(inputs=[x, y], equation="nd,md->nm"), N3, N3)

for kind, make in {
    "Softmax": tf.nn.softmax,
    "LogSoftmax": tf.nn.log_softmax,
    "TopKV2": lambda x: tf.math.top_k(x, 2),
    "MatrixDiagV3": tf.linalg.diag,
    "FFT": lambda x: tf.abs(tf.signal.fft(tf.complex(x, x))),
    "IFFT": lambda x: tf.abs(tf.signal.ifft(tf.complex(x, x))),
    "RFFT": lambda x: tf.abs(tf.signal.rfft(x)),
    "IRFFT": lambda x: tf.signal.irfft(tf.complex(x, x)),
}.items():
    add(kind, make, N34)
    if kind not in ("IRFFT", "TopKV2"):  # they need more than one element
        add_once(kind, (lambda f: lambda x: f(tf.transpose(x, [1, 2, 0])))(make), N34)
for kind, make in {
    "MatrixBandPart": lambda x: tf.linalg.band_part(x, 1, 0),
    "MatrixDiagPartV3": tf.linalg.diag_part,
    "FFT2D": lambda x: tf.abs(tf.signal.fft2d(tf.complex(x, x))),
    "IFFT2D": lambda x: tf.abs(tf.signal.ifft2d(tf.complex(x, x))),
    "RFFT2D": lambda x: tf.abs(tf.signal.rfft2d(x)),
    "IRFFT2D": lambda x: tf.signal.irfft2d(tf.complex(x, x)),
    "FFT3D": lambda x: tf.abs(tf.signal.fft3d(tf.complex(x, x)[:, None])),
    "IFFT3D": lambda x: tf.abs(tf.signal.ifft3d(tf.complex(x, x)[:, None])),
}.items():
    add(kind, make, N34)
    add_once(kind, make, T3N4)


def _definite(function: Callable) -> Callable:
    """Returns a function of positive definite matrices, 3 x 3."""
    return lambda x, *others: function(
        tf.matmul(x, x, transpose_b=True) + 2 * tf.eye(3, dtype=x.dtype), *others
    )


add("Cholesky", _definite(tf.linalg.cholesky), N34, extremes=())  # they are an error
add("MatrixInverse", _definite(tf.linalg.inv), N34, extremes=())
add("MatrixSquareRoot", _definite(tf.linalg.sqrtm), N34, extremes=())
add("SelfAdjointEigV2", _definite(tf.linalg.eigh), N34, extremes=())
add("Svd", _definite(tf.linalg.svd), N34, extremes=())
add("Qr", _definite(tf.linalg.qr), N34, extremes=())
add("Lu", _definite(tf.linalg.lu), N34, extremes=())
add("MatrixSolve", _definite(tf.linalg.solve), N34, N34, extremes=())
add("MatrixTriangularSolve", _definite(tf.linalg.triangular_solve), N34, N34, extremes=())
add_once("MatrixTriangularSolve", _definite(tf.linalg.triangular_solve), (3, 4), N34, extremes=())
add_once("MatrixTriangularSolve", _definite(tf.linalg.triangular_solve), N34, (3, 4), extremes=())
add("MatrixSetDiagV3", lambda x, y: R.MatrixSetDiagV3(input=x, diagonal=y, k=0), N34, N3)
add(
    "MatrixSetDiagV3", lambda x, y: R.MatrixSetDiagV3(input=tf.sort(x, 0), diagonal=y, k=0), N34, N3
)
add_once(
    "MatrixSetDiagV3", lambda x: R.MatrixSetDiagV3(input=x, diagonal=x[:3, 0], k=0), N3, extremes=()
)
add_once(
    "MatrixSolve",
    lambda x: tf.linalg.solve(x @ tf.transpose(x) + tf.eye(tf.shape(x)[0], dtype=x.dtype), x),
    N3,
    extremes=(),
)
add("MatrixDeterminant", _definite(tf.linalg.det), N34)
add("LogMatrixDeterminant", _definite(raw("LogMatrixDeterminant")), N34)


def _sum_of_integers(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.cast(9 * x, tf.int32), 0)


def _all_pairs(x: tf.Tensor) -> tf.Tensor:
    """Returns a matrix with rows along axis 0 and as many columns."""
    return tf.matmul(x, x, transpose_b=True)


def _outer(x: tf.Tensor) -> tf.Tensor:
    """Returns a matrix in parts: the sum of the rows' outer products."""
    return tf.reduce_sum(x[:, :, None] * x[:, None], 0)


add("MatrixDiagV3", gradient_of(tf.linalg.trace), ("n", 3, 3))
# Parts: what is not linear adds them up first.
add_once("Cast", lambda x: tf.cast(tf.reduce_sum(x * 9, 0), tf.int32), N3, extremes=())
add_once("Div", lambda x: R.Div(x=_sum_of_integers(x), y=[2, 3, 4]), N3, extremes=())
add("Div", lambda x: tf.reduce_sum(R.Div(x=tf.reduce_sum(x, 0), y=[2.0, 3.0, 4.0])), N3)
add("Sum", lambda x: tf.reduce_sum(_sum_of_integers(x)), N3, divided=None, extremes=())
add_once("MatMul", lambda x, y: _outer(x) @ _outer(y), N3, N3)
add("MatMul", lambda x, y: y @ _outer(x), N3, N3)
for equation, *shapes in (
    ("n...d->d...n", N34),
    ("...ij,...jk->...ik", N34, ("n", 4, 2)),
    ("...ij,...jk->...ik", T3N4, (1, 4, 2)),
    ("i...j,...jk->k...i", N34, (1, 4, 2)),
    ("...d,...d->...", T3N4, ("n", 4)),
    ("...,...->...", ("n", 1, 4), ("n", 5, 4)),
    ("...d,n...->d...", N34, N3),
):
    add("Einsum", lambda *x, equation=equation: R.Einsum(inputs=x, equation=equation), *shapes)
add_once("Einsum", lambda x: R.Einsum(inputs=[_all_pairs(x)], equation="nn->n"), N3)
add_once("ArgMax", lambda x: tf.argmax(_all_pairs(x), 0), N3)
add("Sin", lambda x, y: tf.sin(y @ _outer(x)), N3, N3)
add("SelectV2", lambda x, y: tf.where(y > 0, x, tf.reduce_sum(x, 0)), N3, (3,))
add("SelectV2", lambda x, y: tf.where(x > 0, y, 2 * y), N3, (3,))
add("Sin", lambda x: tf.sin(tf.where(x > 0, tf.reduce_sum(x, 0), tf.reduce_mean(x, 0))), N3)
add_once(
    "Select",
    lambda c, x: R.Select(condition=tf.sort(c, 0) > 0, x=x, y=-x),
    ("n",),
    N3,
)
add_once("Mean", lambda x: tf.reduce_mean(tf.reshape(x, [-1, 4]), 0), ("n", "m", 4))
add_once("Mean", lambda x: tf.reduce_mean(tf.cast(9 * x, tf.int32), 0), N3, extremes=())
add("ArgMax", lambda x: tf.argmax(x, 0), T3N4)
add("Cumsum", lambda x: tf.cumsum(x, 0), T3N4)
add_once(
    "Cumsum",
    lambda x, y: tf.cumsum(x, tf.cast(y * 0 + 1, tf.int32)),
    N34,
    (),
    extremes=(),
)
# Sizes that only a run knows.
add_once(
    "Max",
    lambda x: tf.reduce_max(tf.cond(x[0, 0] > 0, lambda: x, lambda: x[:, :1]), 1),
    N3,
)
add_once("Exp", lambda x: tf.exp(tf.cond(x[0, 0] > 0, lambda: x, lambda: x[:, :1])), N3)


@pytest.mark.parametrize(
    "cases", CASES.groups, ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_an_operation_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_has_a_case_that_is_divided():
    assert kinds_without(RULES, arithmetic, CASES) == set()
