"""Rules of layers' kernels: convolutions, pooling, cross-entropies and noise."""

from typing import Any

import tensorflow as tf

from towers.divide.facts import ONCE, OWN, PART, WHOLE, Each, rows, rows_of, shape_of
from towers.divide.probes import is_rows, rows_each
from towers.divide.rule import Look, rule

FIRST = rows(0)


@rule("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D")
def convolution(look: Look) -> Each | None:
    """Convolves each row with the same filters."""
    return look.own_first() if look.facts() == [FIRST, ONCE] else None


@rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
def transposed_convolution(look: Look) -> Each | None:
    """Convolves each row's gradient; the first input is the shape of the result."""
    if not look.is_size(0) or look.facts()[1:] != [ONCE, FIRST]:
        return None
    return look.each([shape_of(0), WHOLE, OWN], FIRST)


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def filter_gradient(look: Look) -> Each | None:
    """Sums the gradient of the filters over the rows; the second input is their shape."""
    if look.facts() != [FIRST, ONCE, FIRST]:
        return None
    return look.each([OWN, WHOLE, OWN], PART)


@rule("Dilation2DBackpropInput")
def dilation_gradient(look: Look) -> Each | None:
    """Computes each row's gradient."""
    return look.each([OWN, WHOLE, OWN], FIRST) if look.facts() == [FIRST, ONCE, FIRST] else None


@rule("BiasAdd")
def bias(look: Look) -> Each | None:
    """Adds a vector along the axis of the channels."""
    facts, out = look.facts(), look.out()
    if facts[0].kind != "rows" or facts[1] != ONCE or out is None:
        return None
    channels = 1 if look.attr("data_format") == "NCHW" else len(out) - 1
    return None if facts[0].axis == channels else look.own_first()


@rule("BiasAddGrad")
def bias_gradient(look: Look) -> Each | None:
    """Sums over all axes but the channels' axis."""
    fact, dims = look.fact(0), look.dims(0)
    if fact == PART:
        return look.linear()
    if fact.kind != "rows" or dims is None:
        return None
    channels = 1 if look.attr("data_format") == "NCHW" else len(dims) - 1
    return look.own_first(FIRST if fact.axis == channels else PART)


@rule("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D", "DepthToSpace", "SpaceToDepth", "LRN",
      "ExtractImagePatches", "ExtractVolumePatches", "ResizeBilinear", "ResizeNearestNeighbor",
      "ResizeBicubic", "ResizeArea", "AdjustContrastv2", "AdjustHue", "AdjustSaturation",
      "HSVToRGB", "RGBToHSV")  # fmt: skip
def image(look: Look) -> Each | None:
    """Computes each image from one image; images lie along axis 0."""
    is_whole = all(fact == ONCE for fact in look.facts()[1:])
    if look.type in ("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D") and look.attr("ksize")[0] != 1:
        return None
    has_images = len(look.dims(0) or ()) > 3 or look.type in ("HSVToRGB", "RGBToHSV")
    if look.fact(0) != FIRST or not is_whole or not has_images:
        return None
    return look.own_first()


@rule("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad")
def pooling_gradient(look: Look) -> Each | None:
    """Computes each image's gradient."""
    if look.attr("ksize")[0] != 1 or any(fact.kind != "rows" for fact in look.facts()):
        return None
    return look.each([rows_of(0)] * 3, FIRST) if look.facts() == [FIRST] * 3 else None


@rule("AvgPoolGrad", "AvgPool3DGrad")
def average_pooling_gradient(look: Look) -> Each | None:
    """Computes each image's gradient; the first input is the shape of the result."""
    if not look.is_size(0) or look.fact(1) != FIRST or look.attr("ksize")[0] != 1:
        return None
    return look.each([shape_of(0), OWN], FIRST)


@rule("ResizeBilinearGrad", "ResizeBicubicGrad", "ResizeNearestNeighborGrad")
def resize_gradient(look: Look) -> Each | None:
    """Computes each image's gradient."""
    if look.fact(0) != FIRST:
        return None
    if look.type == "ResizeNearestNeighborGrad":
        return look.own_first() if look.fact(1) == ONCE else None
    return look.each([OWN, rows_of(0)], FIRST) if is_rows((look.dims(1) or [()])[0]) else None


@rule("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits")
def cross_entropy(look: Look) -> Each | None:
    """Computes each row's loss and its gradient."""
    dims = [look.dims(0), look.dims(1)]
    if FIRST not in look.facts() or PART in look.facts() or None in dims:
        return None
    if dims[0][0] != dims[1][0] or not is_rows(dims[0][0]):
        return None
    return look.each([rows_of(0)] * 2, FIRST)


@rule("InTopKV2")
def in_top(look: Look) -> Each | None:
    """Says for each row whether its label is among the largest."""
    if look.facts() != [FIRST, FIRST, ONCE]:
        return None
    return look.each([OWN, OWN, WHOLE], FIRST)


@rule("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessRandomUniformFullIntV2",
      "StatelessRandomUniformIntV2")  # fmt: skip
def noise(look: Look) -> Each | None:
    """Draws a tower's rows of the noise that one device draws.

    Philox makes 128 random bits for each step of its counter: four numbers of up to 32 bits, or two
    of 64. A tower advances the counter by what the rows before its own need.
    """
    axis, out = look.only_rows_axis(), look.out()
    if axis != 0 or not look.is_size(0) or any(f != ONCE for f in look.facts()[1:]):
        return None
    count, numbers = rows_each(out[0]), 2 if look.outputs[0].dtype.size == 8 else 4
    if count is None:
        return None

    def draw(context: Any, op: Any, values: list[Any]) -> list[Any]:
        shape, key, counter, *rest = values
        shape = tf.cast(shape, tf.int64)
        before = tf.cast(context.place.start, tf.int64) * count * tf.reduce_prod(shape[1:])
        low = counter[0] + tf.cast(before // numbers, tf.uint64)
        carry = tf.cast(low < counter[0], tf.uint64)
        skipped = before % numbers
        length = tf.reshape(tf.reduce_prod(shape) + skipped, [1])
        moved = tf.stack([low, counter[1] + carry])
        flat = context.copy(op, [tf.cast(length, values[0].dtype), key, moved, *rest])[0]
        return [tf.reshape(flat[skipped:], shape)]

    return look.each([shape_of(0), *[WHOLE] * (len(look.inputs) - 1)], FIRST, emit=draw)
