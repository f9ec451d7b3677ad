"""Cases of every rule: an operation, and inputs of which some have the rows of the batch.

A shape with "n" has rows along that axis; one without is whole. A case is written once for rows
that a rule divides and once or more for rows that it must not divide.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

R = tf.raw_ops


class Case(NamedTuple):
    """kind: type of the operation. make(*inputs): the trace. shapes: of the inputs.

    divided: whether the operation must run in towers; None: it may. fill: of the inputs, such as
    "positive" or "labels".
    """

    kind: str
    make: Callable[..., Any]
    shapes: tuple
    divided: bool | None = True
    fill: str = "normal"

    @property
    def name(self) -> str:
        places = "_".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        return f"{self.kind}-{places}"


def _raw(kind: str) -> Callable[..., Any]:
    """Returns a call of an operation, with the inputs by their position."""
    operation = getattr(R, kind)
    names = [name for name in inspect.signature(operation).parameters if name != "name"]
    return lambda *inputs: operation(**dict(zip(names, inputs)))


N3, N34, T3N4 = ("n", 3), ("n", 3, 4), (3, "n", 4)
IMAGE = ("n", 6, 6, 2)
CASES: list[Case] = []


def add(
    kind: str, make: Callable, *shapes: tuple, divided: bool | None = True, fill: str = "normal"
) -> None:
    CASES.append(Case(kind, make, shapes, divided, fill))


UNARY = {
    "above_one": "Acosh",
    "positive": "BesselI0e BesselI1e Digamma Inv Lgamma Log Log1p Reciprocal Rsqrt Sqrt",
    "unit": "Acos Asin Atanh Erfinv",
    "probability": "Ndtri",
    "normal": """Abs Asinh Atan Ceil Cos Cosh Elu Erf Erfc Exp Expm1 Floor IsFinite IsInf IsNan
        OnesLike Relu Relu6 Rint Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Square Tan
        Tanh Neg Snapshot StopGradient ZerosLike Identity DebugGradientIdentity PreventGradient""",
}
for fill, kinds in UNARY.items():
    for kind in kinds.split():
        add(kind, _raw(kind), N3, fill=fill)
        add(kind, _raw(kind), T3N4, fill=fill)
add("EnsureShape", lambda x: tf.ensure_shape(x, [None, 3]), N3)
add("Bitcast", lambda x: tf.bitcast(x, tf.int64), N3)
add("Bitcast", lambda x: tf.bitcast(x, tf.int32), N3, divided=None)
add("Cast", lambda x: tf.cast(x, tf.float32), N3)
add("Cast", lambda x: tf.cast(tf.reduce_sum(x, 0), tf.float32), N3)
add("LeakyRelu", _raw("LeakyRelu"), N3)
add("Invert", lambda x: R.Invert(x=tf.cast(x, tf.int32)), N3)
add("LogicalNot", lambda x: tf.logical_not(x > 0), N3)
for kind in ("Angle", "ComplexAbs", "Conj", "Imag", "Real"):
    make = (lambda k: lambda x: _complexes(k, x))(kind)
    add(kind, make, N3)


def _complexes(kind: str, x: tf.Tensor) -> tf.Tensor:
    z = tf.complex(x, x * x)
    functions = {"Angle": tf.math.angle, "ComplexAbs": tf.abs, "Conj": tf.math.conj,
                 "Imag": tf.math.imag, "Real": tf.math.real}  # fmt: skip
    found = functions[kind](tf.cast(z, tf.complex64))  # no other type has all kernels
    return tf.math.real(found) if kind == "Conj" else found


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
        add(kind, _raw(kind), N3, N3, fill=fill)
        if kind not in SAME_SHAPE:
            add(kind, _raw(kind), N3, (3,), fill=fill)
            add(kind, _raw(kind), (3, 1, 4), T3N4, fill=fill)
            add(kind, _raw(kind), ("n", 1), (1, "n"), fill=fill)  # every row with every row
for kind in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "TruncateDiv"):
    add(kind, (lambda k: lambda x, y: _integers(k, x, y))(kind), N3, N3, fill="labels")


def _integers(kind: str, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return getattr(R, kind)(x=tf.cast(x, tf.int32), y=tf.cast(y, tf.int32) + 1)


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
add("AddV2", lambda x, y: tf.reduce_sum(x, 0) + y, N3, (3,), divided=False)
add("Mul", lambda x, y: tf.reduce_sum(x, 0) * y, N3, (3,))
add("Mul", lambda x, y: tf.reduce_sum(x, 0) * tf.reduce_sum(y, 0), N3, N3, divided=None)
add("RealDiv", lambda x, y: y / tf.reduce_sum(x, 0), N3, (3,), divided=False)
add("Select", lambda x, y: R.Select(condition=x > 0, x=x, y=y), N3, N3)
add("Select", lambda c, x: R.Select(condition=c > 0, x=x, y=-x), ("n",), N3, divided=None)
add("SelectV2", lambda x, y: tf.where(x > 0, x, y), N3, (3,))
add("SelectV2", lambda x, y: tf.where(y > 0, tf.reduce_sum(x, 0), y), N3, (3,))
add("IdentityN", lambda x, y: R.IdentityN(input=[x, y]), N3, (3,))

# The rule of Square does not hold for parts: (a + b)^2 is not a^2 + b^2.
add("Square", lambda x: tf.square(tf.reduce_sum(x, 0)), N3, divided=False)
add("Sqrt", lambda x: tf.sqrt(tf.reduce_sum(x, 0)), N3, divided=False, fill="positive")

for kind, make in {
    "Sum": tf.reduce_sum,
    "Mean": tf.reduce_mean,
    "Max": tf.reduce_max,
    "Min": tf.reduce_min,
    "Prod": tf.reduce_prod,
    "All": lambda x, a: tf.reduce_all(x > 0, a),
    "Any": lambda x, a: tf.reduce_any(x > 0, a),
    "EuclideanNorm": tf.math.reduce_euclidean_norm,
}.items():
    sums_rows = kind in ("Sum", "Mean")
    add(kind, (lambda f: lambda x: f(x, 1))(make), N34)
    add(kind, (lambda f: lambda x: f(x, -1))(make), T3N4)
    add(kind, (lambda f: lambda x: f(x, 0))(make), N34, divided=sums_rows)
    add(kind, (lambda f: lambda x: f(x, [0, 1]))(make), T3N4, divided=sums_rows)
    if kind not in ("All", "Any"):
        add(kind, (lambda f: lambda x: f(x, 0, keepdims=True))(make), N34, divided=sums_rows)
add("Mean", lambda x: tf.reduce_mean(tf.reshape(x, [-1, 4])), N34)
add("Sum", lambda x: tf.reduce_sum(tf.reduce_sum(x, 0), 0), N34)
for kind, make in {"ArgMax": tf.argmax, "ArgMin": tf.argmin}.items():
    add(kind, (lambda f: lambda x: f(x, 1))(make), N34)
    add(kind, (lambda f: lambda x: f(x, 0))(make), N34, divided=False)
for kind, make in {
    "Cumsum": tf.cumsum,
    "Cumprod": tf.math.cumprod,
    "CumulativeLogsumexp": tf.math.cumulative_logsumexp,
}.items():
    add(kind, (lambda f: lambda x: f(x, 1))(make), N34)
    add(kind, (lambda f: lambda x: f(x, 0))(make), N34, divided=False)
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
add("Einsum", lambda x: R.Einsum(inputs=[x], equation="nn->n"), ("n", "n"), divided=False)
add(
    "UnsortedSegmentSum",
    lambda x, i: tf.math.unsorted_segment_sum(x, tf.cast(i, tf.int32), 3),
    N3,
    ("n",),
    fill="labels",
)

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
        add(kind, (lambda f: lambda x: f(tf.transpose(x, [1, 2, 0])))(make), N34, divided=False)
for kind, make in {
    "MatrixBandPart": lambda x: tf.linalg.band_part(x, 1, 0),
    "MatrixDiagPartV3": tf.linalg.diag_part,
    "FFT2D": lambda x: tf.abs(tf.signal.fft2d(tf.complex(x, x))),
    "IFFT2D": lambda x: tf.abs(tf.signal.ifft2d(tf.complex(x, x))),
}.items():
    add(kind, make, N34)
    add(kind, make, T3N4, divided=False)
for kind, make in {
    "Cholesky": tf.linalg.cholesky,
    "MatrixInverse": tf.linalg.inv,
    "MatrixDeterminant": tf.linalg.det,
    "LogMatrixDeterminant": lambda x: R.LogMatrixDeterminant(input=x),
}.items():
    add(
        kind,
        (lambda f: lambda x: f(tf.matmul(x, x, transpose_b=True) + 2 * tf.eye(3, dtype=x.dtype)))(
            make
        ),
        N34,
    )

add("Reshape", lambda x: tf.reshape(x, [-1, 12]), N34)
add("Reshape", lambda x: tf.reshape(x, [-1, 4]), N34)
add("Reshape", lambda x: tf.reshape(tf.reshape(x, [-1, 4]), [-1, 3, 4]), N34)
add("Reshape", lambda x: tf.reshape(x, [3, -1, 2, 2]), T3N4)
add("Reshape", lambda x: tf.reshape(x, [1, -1, 12]), N34)
add("Reshape", lambda x: tf.reshape(x, [-1, 12]), (1, "n", 12))
add("Reshape", lambda x: tf.reshape(x, [4, -1, 3]), N34, divided=False)
add("Reshape", lambda x: tf.reshape(x, [-1, 4]), T3N4, divided=False)
add("Reshape", lambda x: tf.reshape(x, [-1, tf.shape(x)[0]]), N3, divided=False)
add("ExpandDims", lambda x: tf.expand_dims(x, 0), N3)
add("ExpandDims", lambda x: tf.expand_dims(x, -1), N3)
add("ExpandDims", lambda x: tf.expand_dims(tf.reduce_sum(x, 0), 0), N3)
add("Squeeze", lambda x: tf.squeeze(x, 1), ("n", 1, 3))
add("Squeeze", lambda x: tf.squeeze(x, 0), (1, "n", 3))
add("Squeeze", lambda x: tf.squeeze(tf.reduce_sum(x, 0, keepdims=True), 0), N3)
add("Transpose", lambda x: tf.transpose(x, [1, 2, 0]), N34)
add("Transpose", lambda x: tf.transpose(tf.reduce_sum(x, 0)), N34)
add("ConcatV2", lambda x, y: tf.concat([x, y], 1), N3, N3)
add("ConcatV2", lambda x, y: tf.concat([x, y], 0), N3, N3, divided=False)
add("ConcatV2", lambda x, y: tf.concat([x, y], 0), N3, (2, 3), divided=False)
add("ConcatV2", lambda x, y: tf.concat([tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)], 0), N3, N3)
add("Pack", lambda x, y: tf.stack([x, y], 0), N3, N3)
add("Pack", lambda x, y: tf.stack([x, y], 1), T3N4, T3N4)
add("Pack", lambda x, y: tf.stack([x, y], -1), T3N4, T3N4)
add("Pack", lambda x, y: tf.stack([tf.reduce_sum(x), tf.reduce_sum(y)]), N3, N3)
add("Unpack", lambda x: tf.unstack(x, axis=1), N34)
add("Unpack", lambda x: tf.unstack(x, axis=0), T3N4)
add("Unpack", lambda x: tf.unstack(tf.reduce_sum(x, 0)), N34)
add("Split", lambda x: tf.split(x, 2, 2), N34)
add("Split", lambda x: tf.split(tf.reduce_sum(x, 0), 2, 1), N34)
add("SplitV", lambda x: tf.split(x, [1, 3], 2), N34)
add("ReverseV2", lambda x: tf.reverse(x, [1]), N34)
add("ReverseV2", lambda x: tf.reverse(x, [0]), N34, divided=False)
add("Roll", lambda x: tf.roll(x, 1, 1), N34)
add("Roll", lambda x: tf.roll(x, 1, 0), N34, divided=False)
add("Slice", lambda x: tf.slice(x, [0, 1, 0], [-1, 2, 3]), N34)
add("Slice", lambda x: tf.slice(x, [1, 0, 0], [-1, 2, 3]), N34, divided=False)
add("Slice", lambda x: tf.slice(x, [0, 0], [tf.shape(x)[0], 2]), N3)
add("Pad", lambda x: tf.pad(x, [[0, 0], [1, 2]]), N3)
add("Pad", lambda x: tf.pad(x, [[1, 0], [1, 2]]), N3, divided=False)
add("PadV2", lambda x: tf.pad(x, [[0, 0], [1, 2]], constant_values=7), N3)
add("MirrorPad", lambda x: tf.pad(x, [[0, 0], [1, 1]], "REFLECT"), N3)
add(
    "MirrorPadGrad",
    lambda x: R.MirrorPadGrad(input=x, paddings=[[0, 0], [1, 1]], mode="REFLECT"),
    ("n", 5),
)
add("StridedSlice", lambda x: x[:, 1:], N34)
add("StridedSlice", lambda x: x[:, 0], N34)
add("StridedSlice", lambda x: x[0], T3N4)
add("StridedSlice", lambda x: x[..., None, 1], N34)
add("StridedSlice", lambda x: x[None, :, ::2], N34)
add("StridedSlice", lambda x: x[0 : tf.shape(x)[0], :2], N34)
add("StridedSlice", lambda x: x[1:], N34, divided=False)
add("StridedSlice", lambda x: x[::2], N34, divided=False)
add("StridedSlice", lambda x: x[::-1], N34, divided=False)
add("StridedSlice", lambda x: x[: tf.shape(x)[0] // 2], N34, divided=False)
add("StridedSlice", lambda x: x[0], N34, divided=False)
add("StridedSlice", lambda x: tf.reduce_sum(x, 0)[1:], N34)


def _gradient_of(function: Callable) -> Callable:
    def gradient(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
            loss = tf.reduce_sum(y * tf.sin(y))
        return tape.gradient(loss, x)

    return gradient


add("Slice", _gradient_of(lambda x: tf.concat([x, x * x], 2)), N34)
add("StridedSliceGrad", _gradient_of(lambda x: x[:, 1:]), N34)
add("StridedSliceGrad", _gradient_of(lambda x: x[0]), T3N4)
add("StridedSliceGrad", _gradient_of(lambda x: x[1:]), N34, divided=False)
add("StridedSliceGrad", _gradient_of(lambda x: x[0]), N34, divided=False)
add("BroadcastTo", lambda x: tf.broadcast_to(x, tf.shape(tf.stack([x, x]))), N3)
add("BroadcastTo", lambda x, y: tf.broadcast_to(y, tf.shape(x)), N3, (3,))
add("BroadcastTo", lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), tf.shape(x)), N3)
add("BroadcastTo", lambda x: tf.broadcast_to(tf.reduce_sum(x, 0), [2, 3]), N3)
add("BroadcastTo", lambda x: tf.broadcast_to(x[:1], tf.shape(x)), N3, divided=None)
add("Tile", lambda x: tf.tile(x, [1, 2]), N3)
add("Tile", lambda x: tf.tile(x, [2, 1]), N3, divided=False)
add("Tile", lambda x, y: tf.tile(y[None], [tf.shape(x)[0], 1]), N3, (3,))
add("Tile", lambda x: tf.tile(tf.reduce_sum(x, 0), [2]), N3)
add("Fill", lambda x, y: tf.fill(tf.shape(x), y), N3, ())
add("Fill", lambda x, y: tf.fill([tf.shape(x)[0], tf.shape(x)[0]], y), N3, (), divided=False)
add("Fill", lambda x, y: tf.fill([tf.maximum(tf.shape(x)[0], 3)], y), N3, (), divided=False)
add("Fill", lambda x, y: tf.fill([(tf.shape(x)[0] + 3) // 4 * 4], y), N3, (), divided=False)


def _more_for_few_rows(x: tf.Tensor) -> tf.Tensor:
    count = tf.shape(x)[0]
    return count * tf.where(count > 5, 1, 2)


add("Fill", lambda x, y: tf.fill([_more_for_few_rows(x)], y), N3, (), divided=False)
add("OneHot", lambda i: tf.one_hot(tf.cast(i, tf.int32), 4), N3, fill="labels")
add("OneHot", lambda i: tf.one_hot(tf.cast(i, tf.int32), 4, axis=0), N3, fill="labels")
add("GatherV2", lambda i, w: tf.gather(w, tf.cast(i, tf.int32)), N3, (5, 2), fill="labels")
add("GatherV2", lambda i, w: tf.gather(w, tf.cast(i, tf.int32), axis=1), N3, (2, 5), fill="labels")
add("GatherV2", lambda x: tf.gather(x, [2, 0], axis=1), N34)
add("GatherV2", lambda x: tf.gather(x, [[2, 0]], axis=0), T3N4)
add("GatherV2", lambda x: tf.gather(x, [0], axis=0), N34, divided=False)
add(
    "GatherV2",
    lambda x, i: tf.gather(x, tf.cast(i, tf.int32), axis=1, batch_dims=1),
    ("n", 5, 2),
    N3,
    fill="labels",
)
add(
    "GatherV2",
    lambda x, i: tf.gather(x, tf.cast(i, tf.int32) % tf.shape(x)[0]),
    N3,
    ("n",),
    divided=None,
    fill="labels",
)
add("GatherV2", lambda x: tf.gather(tf.reduce_sum(x, 0), [1]), N3)
add(
    "GatherNd",
    lambda i, w: tf.gather_nd(w, tf.cast(i, tf.int32)),
    ("n", 3, 1),
    (5, 2),
    fill="labels",
)

add("Conv2D", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), IMAGE, (3, 3, 2, 4))
add("Conv3D", lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), ("n", 4, 4, 4, 2), (2, 2, 2, 2, 3))
add(
    "DepthwiseConv2dNative",
    lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"),
    IMAGE,
    (3, 3, 2, 1),
)
add(
    "Dilation2D",
    lambda x, w: tf.nn.dilation2d(x, w, [1] * 4, "SAME", "NHWC", [1] * 4),
    IMAGE,
    (3, 3, 2),
)
add(
    "Conv2D",
    lambda x, y: tf.nn.conv2d(x, tf.reshape(tf.reduce_mean(y, 0), [3, 3, 2, 4]), 1, "SAME"),
    IMAGE,
    ("n", 72),
    divided=None,
)
_FILTERS = {2: (3, 3, 2, 4), 3: (2, 2, 2, 2, 3)}


def _convolution_gradients(convolve: Callable, which: int) -> Callable:
    def gradient(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            y = convolve(x, w)
            loss = tf.reduce_sum(y * tf.sin(y))
        return tape.gradient(loss, [x, w])[which]

    return gradient


for kinds, convolve, shapes in (
    (
        ("Conv2DBackpropInput", "Conv2DBackpropFilter"),
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
        (IMAGE, (3, 3, 2, 4)),
    ),
    (
        ("Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"),
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"),
        (("n", 4, 4, 4, 2), (2, 2, 2, 2, 3)),
    ),
    (
        ("DepthwiseConv2dNativeBackpropInput", "DepthwiseConv2dNativeBackpropFilter"),
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"),
        (IMAGE, (3, 3, 2, 1)),
    ),
    (
        ("Dilation2DBackpropInput", None),
        lambda x, w: tf.nn.dilation2d(x, w, [1] * 4, "SAME", "NHWC", [1] * 4),
        (IMAGE, (3, 3, 2)),
    ),
):
    for which, kind in enumerate(kinds):
        if kind:
            add(kind, _convolution_gradients(convolve, which), *shapes)
add("BiasAdd", tf.nn.bias_add, N34, (4,))
add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=x), N34)
add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=tf.transpose(x, [1, 2, 0])), N34)
IMAGES: dict[str, tuple[Callable, tuple]] = {
    "MaxPool": (lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), IMAGE),
    "AvgPool": (lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"), IMAGE),
    "MaxPool3D": (
        lambda x: tf.nn.max_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"),
        ("n", 4, 4, 4, 2),
    ),
    "AvgPool3D": (
        lambda x: tf.nn.avg_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"),
        ("n", 4, 4, 4, 2),
    ),
    "DepthToSpace": (lambda x: tf.nn.depth_to_space(x, 2), ("n", 3, 3, 4)),
    "SpaceToDepth": (lambda x: tf.nn.space_to_depth(x, 2), IMAGE),
    "LRN": (lambda x: tf.nn.lrn(tf.cast(x, tf.float32)), IMAGE),
    "ExtractImagePatches": (
        lambda x: tf.image.extract_patches(x, [1, 2, 2, 1], [1] * 4, [1] * 4, "SAME"),
        IMAGE,
    ),
    "ExtractVolumePatches": (
        lambda x: tf.extract_volume_patches(x, [1, 2, 2, 2, 1], [1] * 5, "SAME"),
        ("n", 4, 4, 4, 2),
    ),
    "ResizeBilinear": (lambda x: tf.image.resize(x, [4, 5]), IMAGE),
    "ResizeNearestNeighbor": (lambda x: tf.image.resize(x, [4, 5], "nearest"), IMAGE),
    "ResizeBicubic": (lambda x: R.ResizeBicubic(images=x, size=[4, 5]), IMAGE),
    "ResizeArea": (lambda x: R.ResizeArea(images=x, size=[3, 3]), IMAGE),
    "AdjustContrastv2": (
        lambda x: R.AdjustContrastv2(images=tf.cast(x, tf.float32), contrast_factor=2.0),
        ("n", 4, 4, 3),
    ),
    "AdjustHue": (lambda x: R.AdjustHue(images=tf.cast(x, tf.float32), delta=0.1), ("n", 4, 4, 3)),
    "AdjustSaturation": (
        lambda x: R.AdjustSaturation(images=tf.cast(x, tf.float32), scale=0.5),
        ("n", 4, 4, 3),
    ),
    "HSVToRGB": (lambda x: tf.image.hsv_to_rgb(x), N3),
    "RGBToHSV": (lambda x: tf.image.rgb_to_hsv(x), N3),
}
for kind, (make, shape) in IMAGES.items():
    add(kind, make, shape, fill="probability")
for kind, make, shape in (
    ("MaxPoolGrad", lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), IMAGE),
    (
        "MaxPool3DGrad",
        lambda x: tf.nn.max_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"),
        ("n", 4, 4, 4, 2),
    ),
    ("AvgPoolGrad", lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"), IMAGE),
    (
        "AvgPool3DGrad",
        lambda x: tf.nn.avg_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"),
        ("n", 4, 4, 4, 2),
    ),
    ("ResizeBilinearGrad", lambda x: tf.image.resize(tf.cast(x, tf.float32), [4, 5]), IMAGE),
    (
        "ResizeBicubicGrad",
        lambda x: R.ResizeBicubic(images=tf.cast(x, tf.float32), size=[4, 5]),
        IMAGE,
    ),
    ("ResizeNearestNeighborGrad", lambda x: tf.image.resize(x, [4, 5], "nearest"), IMAGE),
):
    add(kind, _gradient_of(make), shape)
for kind, gradient in (
    ("MaxPoolGradGrad", R.MaxPoolGradGrad),
    ("MaxPool3DGradGrad", R.MaxPool3DGradGrad),
):
    size = 4 if kind == "MaxPoolGradGrad" else 5
    add(
        kind,
        (
            lambda g, s: (
                lambda x, y, z: g(
                    orig_input=x,
                    orig_output=y,
                    grad=z,
                    ksize=[1, *[2] * (s - 2), 1],
                    strides=[1, *[2] * (s - 2), 1],
                    padding="SAME",
                )
            )
        )(gradient, size),
        ("n", *[4] * (size - 2), 2),
        ("n", *[2] * (size - 2), 2),
        ("n", *[4] * (size - 2), 2),
        fill="float32",
    )
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: R.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.nn.softmax(y)),
    N3,
    N3,
)
add(
    "SparseSoftmaxCrossEntropyWithLogits",
    lambda x, i: R.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=tf.cast(i, tf.int32)),
    ("n", 5),
    ("n",),
    fill="labels",
)
add(
    "InTopKV2",
    lambda x, i: R.InTopKV2(predictions=tf.cast(x, tf.float32), targets=tf.cast(i, tf.int32), k=2),
    ("n", 5),
    ("n",),
    fill="labels",
)


def _noise(kind: str, dtype: tf.DType) -> Callable:
    def draw(x: tf.Tensor) -> tf.Tensor:
        key, counter = R.StatelessRandomGetKeyCounter(seed=[3, 4])
        more: dict[str, Any] = {"dtype": dtype}
        if kind == "StatelessRandomUniformIntV2":
            more = {"minval": tf.constant(0, dtype), "maxval": tf.constant(99, dtype)}
        found = getattr(R, kind)(shape=tf.shape(x), key=key, counter=counter, alg=1, **more)
        return tf.cast(found, tf.float64) + 0 * x

    return draw


FLOATS, INTEGERS = (tf.float16, tf.float32, tf.float64), (tf.int32, tf.int64)
for kind, dtypes in {
    "StatelessRandomUniformV2": FLOATS,
    "StatelessRandomNormalV2": FLOATS,
    "StatelessRandomUniformIntV2": INTEGERS,
    "StatelessRandomUniformFullIntV2": INTEGERS,
}.items():
    for dtype in dtypes:
        for shape in (N3, ("n", 5, 3), ("n",)):
            add(kind, _noise(kind, dtype), shape)
add("StatelessRandomUniformV2", _noise("StatelessRandomUniformV2", tf.float64), T3N4, divided=False)
