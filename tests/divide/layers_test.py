"""Every rule of layers.py by itself: whole and divided among towers."""

from collections.abc import Callable
from typing import Any

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

CASES.add("Conv2D", lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), IMAGE, (3, 3, 2, 4))
CASES.add(
    "Conv3D", lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), ("n", 4, 4, 4, 2), (2, 2, 2, 2, 3)
)
CASES.add(
    "DepthwiseConv2dNative",
    lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"),
    IMAGE,
    (3, 3, 2, 1),
)
CASES.add(
    "Dilation2D",
    lambda x, w: tf.nn.dilation2d(x, w, [1] * 4, "SAME", "NHWC", [1] * 4),
    IMAGE,
    (3, 3, 2),
)
CASES.add(
    "Conv2D",
    lambda x, y: tf.nn.conv2d(x, tf.reshape(tf.reduce_mean(y, 0), [3, 3, 2, 4]), 1, "SAME"),
    IMAGE,
    ("n", 72),
    divided=None,
)
CONVOLUTIONS: tuple = (
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
        ("Dilation2DBackpropInput",),
        lambda x, w: tf.nn.dilation2d(x, w, [1] * 4, "SAME", "NHWC", [1] * 4),
        (IMAGE, (3, 3, 2)),
    ),
)
for kinds, convolve, shapes in CONVOLUTIONS:
    for which, kind in enumerate(kinds):
        CASES.add(kind, gradient_of(convolve, which), *shapes)
CASES.add("BiasAdd", tf.nn.bias_add, N34, (4,))
CASES.add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=x), N34)
CASES.add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=tf.transpose(x, [1, 2, 0])), N34)
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
    CASES.add(kind, make, shape, fill="probability")
POOLS: tuple = (
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
)
for kind, make, shape in POOLS:
    CASES.add(kind, gradient_of(make), shape, fill="probability")
for kind, gradient in (
    ("MaxPoolGradGrad", R.MaxPoolGradGrad),
    ("MaxPool3DGradGrad", R.MaxPool3DGradGrad),
):
    size = 4 if kind == "MaxPoolGradGrad" else 5
    CASES.add(
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
CASES.add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: R.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.nn.softmax(y)),
    N3,
    N3,
)
CASES.add(
    "SparseSoftmaxCrossEntropyWithLogits",
    lambda x, i: R.SparseSoftmaxCrossEntropyWithLogits(features=x, labels=tf.cast(i, tf.int32)),
    ("n", 5),
    ("n",),
    fill="labels",
)
CASES.add(
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
            CASES.add(kind, _noise(kind, dtype), shape)
CASES.add(
    "StatelessRandomUniformV2", _noise("StatelessRandomUniformV2", tf.float64), T3N4, divided=False
)


def _height_first(function: Callable) -> Callable:
    """Returns a function of images whose rows lie along their height."""
    return lambda x, *w: function(tf.transpose(x, [1, 0, *range(2, len(x.shape))]), *w)


for kinds, convolve, shapes in CONVOLUTIONS:
    for which, kind in enumerate(kinds):
        CASES.add(kind, gradient_of(_height_first(convolve), which), *shapes, divided=False)
for kind in ("Conv2D", "Conv2DBackpropFilter"):
    CASES.add(
        kind,
        gradient_of(
            lambda x, y: tf.nn.conv2d(x, tf.reshape(tf.reduce_mean(y, 0), [3, 3, 2, 4]), 1, "SAME"),
            1,
        ),
        IMAGE,
        ("n", 72),
    )
for kind in ("MaxPool", "AvgPool", "LRN", "ResizeBilinear"):
    CASES.add(kind, _height_first(IMAGES[kind][0]), IMAGE, divided=False, fill="probability")
CASES.add(
    "AdjustContrastv2", lambda x: tf.image.adjust_contrast(x, 2.0), ("n", 4, 3), divided=False
)
for kind, make, shape in POOLS:
    CASES.add(kind, gradient_of(_height_first(make)), shape, fill="probability", divided=False)
CASES.add(
    "BiasAdd",
    lambda x, b: tf.nn.bias_add(tf.transpose(x, [1, 2, 0]), b),
    N34,
    ("n",),
    divided=False,
)
CASES.add("BiasAdd", lambda x, b: tf.nn.bias_add(x, b, "NCHW"), ("n", 3, 4, 4), (3,))
CASES.add(
    "BiasAdd", lambda x, b: tf.nn.bias_add(x, b, "NCHW"), (3, "n", 4, 4), ("n",), divided=False
)
CASES.add(
    "BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=x, data_format="NCHW"), ("n", 3, 4, 4)
)
CASES.add(
    "BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=x, data_format="NCHW"), (3, "n", 4, 4)
)
CASES.add("BiasAddGrad", lambda x: R.BiasAddGrad(out_backprop=tf.reduce_sum(x, 0)), N34)
CASES.add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x, y: R.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.nn.softmax(y)), N3, (1, 3),
    divided=False,
)  # fmt: skip
CASES.add(
    "SoftmaxCrossEntropyWithLogits",
    lambda x: R.SoftmaxCrossEntropyWithLogits(features=x, labels=tf.sort(x, 0)), N3,
)  # fmt: skip


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
    CASES.add(
        "StatelessRandomNormalV2", _noise_of(shape), ("n", "m"), (), divided=is_divided, extremes=()
    )


@pytest.mark.parametrize(
    "cases", CASES.groups, ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_an_operation_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_has_a_case_that_is_divided():
    assert kinds_without(RULES, layers, CASES) == set()
