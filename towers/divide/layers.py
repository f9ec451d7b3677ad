"""Rules of layers' kernels: convolutions, pooling, cross-entropies and noise."""

import tensorflow as tf

from towers.divide.context import Context
from towers.divide.facts import PART, WHOLE, Each, Op, rows_of, shape_of
from towers.divide.probes import is_fixed, rows_each
from towers.divide.rule import FIRST, Look, batches, rule, rule_of_rows


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D")
def convolution(look: Look) -> Each | None:
    """Convolves each row with the same filters."""
    return batches(look, [0])


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
def transposed_convolution(look: Look) -> Each | None:
    """Convolves each row's gradient; the first input is the shape of the result."""
    return look.each([shape_of(0), WHOLE, rows_of(0)], FIRST)


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def filter_gradient(look: Look) -> Each | None:
    """Sums the gradient of the filters over the rows; the second input is their shape."""
    return batches(look, [0, 2], PART)


@rule("Dilation2DBackpropInput")
def dilation_gradient(look: Look) -> Each | None:
    """Computes each row's gradient."""
    return batches(look, [0, 2])


@rule_of_rows("BiasAdd")
def bias(look: Look) -> Each | None:
    """Adds a vector along the axis of the channels."""
    if look.fact(0).axis == _channels(look):
        return None
    return look.own_first()


@rule_of_rows("BiasAddGrad", is_linear=True)
def bias_gradient(look: Look) -> Each | None:
    """Sums over all axes but the channels' axis."""
    return look.own_first(FIRST if look.fact(0).axis == _channels(look) else PART)


def _channels(look: Look) -> int:
    """Returns the axis of the channels."""
    if look.attr("data_format") == "NCHW":
        return 1
    return len(look.dims(0)) - 1


@rule("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "DepthToSpace", "SpaceToDepth", "LRN",
      "ExtractImagePatches", "ExtractVolumePatches", "ResizeBilinear", "ResizeNearestNeighbor",
      "ResizeBicubic", "ResizeArea", "AdjustContrastv2", "AdjustHue", "AdjustSaturation",
      "HSVToRGB", "RGBToHSV", "ScaleAndTranslate")  # fmt: skip
def image(look: Look) -> Each | None:
    """Computes each image from one image; images lie along axis 0."""
    if look.type == "AdjustContrastv2" and len(look.dims(0)) == 3:
        return None  # one image
    return batches(look, [0])


@rule("ImageProjectiveTransformV3")
def moved_image(look: Look) -> Each | None:
    """Rotates or moves each image: each in another way, or all images alike."""
    return batches(look, [0] if is_fixed(look.dims(1)[0]) else [0, 1])


@rule("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad")
def pooling_gradient(look: Look) -> Each | None:
    """Computes each image's gradient."""
    return batches(look, [0, 1, 2])


@rule("AvgPoolGrad", "AvgPool3DGrad")
def average_pooling_gradient(look: Look) -> Each | None:
    """Computes each image's gradient; the first input is the shape of the result."""
    return look.each([shape_of(0), rows_of(0)], FIRST)


@rule("ResizeBilinearGrad", "ResizeBicubicGrad", "ResizeNearestNeighborGrad",
      "ScaleAndTranslateGrad")  # fmt: skip
def resize_gradient(look: Look) -> Each | None:
    """Computes each image's gradient; the second input has the images' size, or is it."""
    return batches(look, [0] if look.type == "ResizeNearestNeighborGrad" else [0, 1])


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "InTopKV2")
def of_labels(look: Look) -> Each | None:
    """Computes each row from its scores and its label."""
    return batches(look, [0, 1])


@rule("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessRandomUniformFullIntV2",
      "StatelessRandomUniformIntV2")  # fmt: skip
def noise(look: Look) -> Each | None:
    """Draws a tower's rows of the noise that one device draws.

    Philox makes 128 random bits for each step of its counter: four numbers of up to 32 bits, or two
    of 64. A tower advances the counter by what the rows before its own need.
    """
    if look.only_rows_axis() != 0:
        return None
    count, numbers = rows_each(look.out()[0]), 2 if look.outputs[0].dtype.size == 8 else 4
    if count is None:
        return None

    def draw(context: Context, op: Op, values: list[tf.Tensor]) -> list[tf.Tensor]:
        shape, key, counter, *rest = values
        shape = tf.cast(shape, tf.int64)
        before = tf.cast(context.place.start, tf.int64) * count * tf.reduce_prod(shape[1:])
        low = counter[0] + tf.cast(before // numbers, tf.uint64)
        carry = tf.cast(low < counter[0], tf.uint64)
        skipped = before % numbers
        size = tf.reduce_prod(shape, keepdims=True)
        length = size + numbers - 1  # XLA compiles for each length
        moved = tf.stack([low, counter[1] + carry])
        flat = context.copy(op, [tf.cast(length, values[0].dtype), key, moved, *rest])[0]
        return [tf.reshape(tf.slice(flat, [skipped], size), shape)]

    return look.each([shape_of(0), *[WHOLE] * (len(look.inputs) - 1)], FIRST, emit=draw)
