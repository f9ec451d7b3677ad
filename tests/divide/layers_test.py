"""Every rule of layers.py by itself: whole and divided among towers."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.divide.whole_and_divided import (
    IMAGE,
    N3,
    N34,
    R,
    T3N4,
    Cases,
    assert_alike,
    gradient_of,
    kinds_without,
)
from towers.divide import layers
from towers.divide.rule import RULES

CASES = Cases()
add, add_once = CASES.add, CASES.add_once


def _height_first(function: Callable) -> Callable:
    """Returns a function of images whose rows lie along their height."""
    return lambda x, *w: function(tf.transpose(x, [1, 0, *range(2, len(x.shape))]), *w)


VOLUME = ("n", 4, 4, 4, 2)
CONVOLUTIONS: tuple = (  # the kinds of the operation and of its gradients
    (
        "Conv2D Conv2DBackpropInput Conv2DBackpropFilter",
        lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
        (IMAGE, (3, 3, 2, 4)),
    ),
    (
        "Conv3D Conv3DBackpropInputV2 Conv3DBackpropFilterV2",
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"),
        (VOLUME, (2, 2, 2, 2, 3)),
    ),
    (
        "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput "
        "DepthwiseConv2dNativeBackpropFilter",
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"),
        (IMAGE, (3, 3, 2, 1)),
    ),
    (
        "Dilation2D Dilation2DBackpropInput",
        lambda x, w: tf.nn.dilation2d(x, w, [1] * 4, "SAME", "NHWC", [1] * 4),
        (IMAGE, (3, 3, 2)),
    ),
)
for kinds, convolve, shapes in CONVOLUTIONS:
    forward, *backward = kinds.split()
    add(forward, convolve, *shapes)
    for which, kind in enumerate(backward):
        add(kind, gradient_of(convolve, which), *shapes)
        add_once(kind, gradient_of(_height_first(convolve), which), *shapes)


def _of_kernel_from_rows(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.nn.conv2d(x, tf.reshape(tf.reduce_mean(y, 0), [3, 3, 2, 4]), 1, "SAME")


add("Conv2D", _of_kernel_from_rows, IMAGE, ("n", 72), divided=None)
for kind in ("Conv2D", "Conv2DBackpropFilter"):
    add(kind, gradient_of(_of_kernel_from_rows, 1), IMAGE, ("n", 72))
add("BiasAdd", tf.nn.bias_add, N34, (4,))
add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=x), N34)
add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=tf.transpose(x, [1, 2, 0])), N34)


def rotated(x: tf.Tensor, turns: tf.Tensor) -> tf.Tensor:
    """Moves each image by a number of its own; turns: [n, 1], or [1, 1] for all images."""
    zeros = tf.zeros_like(turns)
    place = tf.concat([zeros + 1, turns, zeros, -turns, zeros + 1, zeros, zeros, zeros], 1)
    return R.ImageProjectiveTransformV3(
        images=x, transforms=tf.cast(place, tf.float32), output_shape=[5, 4], fill_value=0.0,
        interpolation="BILINEAR",
    )  # fmt: skip


def scaled(x: tf.Tensor) -> tf.Tensor:
    return R.ScaleAndTranslate(images=x, size=[4, 5], scale=[0.7, 0.9], translation=[0.1, 0.0])


IMAGES: dict[str, tuple[Callable, tuple]] = {
    "MaxPool": (lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"), IMAGE),
    "AvgPool": (lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"), IMAGE),
    "MaxPool3D": (
        lambda x: tf.nn.max_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"),
        VOLUME,
    ),
    "AvgPool3D": (
        lambda x: tf.nn.avg_pool3d(tf.cast(x, tf.float32), 2, 2, "SAME"),
        VOLUME,
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
        VOLUME,
    ),
    "ResizeBilinear": (lambda x: tf.image.resize(tf.cast(x, tf.float32), [4, 5]), IMAGE),
    "ResizeNearestNeighbor": (lambda x: tf.image.resize(x, [4, 5], "nearest"), IMAGE),
    "ResizeBicubic": (lambda x: R.ResizeBicubic(images=tf.cast(x, tf.float32), size=[4, 5]), IMAGE),
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
    "ImageProjectiveTransformV3": (lambda x: rotated(x, x[:, 0, 0, :1]), IMAGE),
    "ScaleAndTranslate": (lambda x: scaled(tf.cast(x, tf.float32)), IMAGE),
    "HSVToRGB": (lambda x: tf.image.hsv_to_rgb(x), N3),
    "RGBToHSV": (lambda x: tf.image.rgb_to_hsv(x), N3),
}
for kind, (make, shape) in IMAGES.items():
    add(kind, make, shape, fill="probability")
add("ImageProjectiveTransformV3", lambda x, y: rotated(x, y), IMAGE, (1, 1), fill="probability")
GRADIENTS = {
    "MaxPoolGrad": "MaxPool",
    "MaxPool3DGrad": "MaxPool3D",
    "AvgPoolGrad": "AvgPool",
    "AvgPool3DGrad": "AvgPool3D",
    "ResizeBilinearGrad": "ResizeBilinear",
    "ResizeBicubicGrad": "ResizeBicubic",
    "ResizeNearestNeighborGrad": "ResizeNearestNeighbor",
    "ScaleAndTranslateGrad": "ScaleAndTranslate",
}
for kind, forward in GRADIENTS.items():
    make, shape = IMAGES[forward]
    add(kind, gradient_of(make), shape, fill="probability")
    add_once(kind, gradient_of(_height_first(make)), shape, fill="probability")


def _twice(gradient: Callable, *inner: int) -> Callable:
    size = [1, *inner, 1]
    return lambda x, y, z: gradient(
        orig_input=x, orig_output=y, grad=z, ksize=size, strides=size, padding="SAME"
    )


for kind, inner in (("MaxPoolGradGrad", (2, 2)), ("MaxPool3DGradGrad", (2, 2, 2))):
    large, small = ("n", *[4] * len(inner), 2), ("n", *inner, 2)
    add(kind, _twice(getattr(R, kind), *inner), large, small, large, fill="float32")
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
add_once("StatelessRandomUniformV2", _noise("StatelessRandomUniformV2", tf.float64), T3N4)


for kind in ("MaxPool", "AvgPool", "LRN", "ResizeBilinear"):
    add_once(kind, _height_first(IMAGES[kind][0]), IMAGE, fill="probability")
add_once("AdjustContrastv2", lambda x: tf.image.adjust_contrast(x, 2.0), ("n", 4, 3))
add_once(
    "BiasAdd",
    lambda x, b: tf.nn.bias_add(tf.transpose(x, [1, 2, 0]), b),
    N34,
    ("n",),
)
add("BiasAdd", lambda x, b: tf.nn.bias_add(x, b, "NCHW"), ("n", 3, 4, 4), (3,))
add_once("BiasAdd", lambda x, b: tf.nn.bias_add(x, b, "NCHW"), (3, "n", 4, 4), ("n",))
add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=x, data_format="NCHW"), ("n", 3, 4, 4))
add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=x, data_format="NCHW"), (3, "n", 4, 4))
add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=tf.reduce_sum(x, 0)), N34)
add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x: R.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.sort(x, 0)), N3,
)  # fmt: skip


def _gradients(*inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Of a convolution with groups, of which TensorFlow has no kernel in float64."""
    of_images, of_kernel = (gradient_of(keras.ops.conv, i)(*inputs) for i in range(2))
    return tf.sin(of_images), of_kernel


add("Sin", _gradients, IMAGE, (3, 3, 1, 4), extremes=())
add("Sin", _gradients, ("n", 3, 3, 3, 2), (2, 2, 2, 1, 4), extremes=())


def _noise_of(shape: Callable) -> Callable:
    """Returns noise of a shape, with a seed that no shape tells."""

    def draw(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        seed = tf.stack([tf.cast(y * 0, tf.int32), 4])
        key, counter = R.StatelessRandomGetKeyCounter(seed=seed)
        return R.StatelessRandomNormalV2(shape=shape(x), key=key, counter=counter, alg=1)

    return draw


for shape, is_divided in (
    (lambda x: [tf.shape(x)[0] * tf.shape(x)[1], 3], False),
    (lambda x: [tf.shape(x)[0], tf.shape(x)[0]], False),
    (lambda x: [], False),
    (lambda x: [2 * tf.shape(x)[0], 3], True),
):
    add(
        "StatelessRandomNormalV2", _noise_of(shape), ("n", "m"), (), divided=is_divided, extremes=()
    )
# Not the first case of a trace: TensorFlow's graph optimizer would take n for 1.
add_once(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: R.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.nn.softmax(y)), N3, (1, 3),
)  # fmt: skip


@pytest.mark.parametrize(
    "cases", CASES.groups, ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_an_operation_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_has_a_case_that_is_divided():
    assert kinds_without(RULES, layers, CASES) == set()
