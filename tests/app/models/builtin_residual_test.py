"""The residual networks: their convolutions, shortcuts and ends, and the choice by image size."""

import keras
import numpy as np
import pytest

from towers.app import models
from towers.app.models import builtin


def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


@pytest.mark.parametrize("name", ["resnet", "resnet20", "resnet56", "resnet50"])
def test_what_is_no_image_is_refused(name):
    with pytest.raises(ValueError, match=rf"model={name}\w* needs images .*\(49,\)"):
        models.load(name).build((49,), 10)


def test_resnet_is_resnet20_below_64_pixels_and_resnet50_from_there_on():
    build = models.load("resnet").build
    names = [build(shape, 3).name for shape in ((64, 63, 1), (64, 64, 1))]
    assert names == ["resnet20", "resnet50"]


def test_resnet50_has_its_strides_in_the_3x3_convolutions():
    layers = layers_of(models.load("resnet50").build((224, 224, 3), 1000), keras.layers.Conv2D)
    assert len(layers) == 53  # 49, and 4 shortcuts'
    strided = [(layer.kernel_size[0], layer.output.shape[1:]) for layer in layers
               if layer.strides == (2, 2)]
    assert strided == [
        (7, (112, 112, 64)),
        (3, (28, 28, 128)), (1, (28, 28, 512)),  # a block, and its shortcut
        (3, (14, 14, 256)), (1, (14, 14, 1024)),
        (3, (7, 7, 512)), (1, (7, 7, 2048)),
    ]


def test_blocks_of_resnet50_begin_as_their_shortcuts():
    model = builtin.build_bottlenecks("small", (64, 64, 3), 10, num_blocks=(2,), filters=4)
    zeros = [not np.any(layer.gamma) for layer in layers_of(model, keras.layers.BatchNormalization)]
    # first convolution | block: 3, then its shortcut | block
    assert zeros == [False, *(False, False, True, False), *(False, False, True)]


def test_a_shortcut_takes_every_second_pixel_and_adds_zeros():
    """Traced by hand: with its convolutions at zero, a network is its shortcuts."""
    model = builtin.build_small("small", (4, 6, 1), 2, num_blocks=1)
    for layer in layers_of(model, keras.layers.Conv2D)[1:]:
        layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
    x = np.random.default_rng(0).random((2, 4, 6, 1), np.float32)
    outputs = [layer.output for layer in layers_of(model, keras.layers.ReLU)]
    first, last = keras.Model(model.input, [outputs[0], outputs[-1]])(x)
    expected = np.zeros((2, 1, 2, 64), np.float32)
    expected[..., :16] = np.asarray(first)[:, ::4, ::4]
    np.testing.assert_array_equal(last, expected)
    assert expected.any()


@pytest.mark.parametrize("size, strides", [(3, 1), (1, 2), (7, 2)])
def test_a_convolutions_windows_are_centred_on_the_pixels_that_a_shortcut_takes(size, strides):
    """A window that is 1 at its centre alone hands these pixels on."""
    x = keras.Input((6, 8, 1))
    model = keras.Model(x, builtin.convolve(x, 1, size, strides, relu=False))
    window = np.zeros((size, size, 1, 1), np.float32)
    window[size // 2, size // 2] = 1
    layers_of(model, keras.layers.Conv2D)[0].kernel.assign(window)
    image = np.random.default_rng(0).normal(size=(2, 6, 8, 1)).astype(np.float32)
    scale = 1 / np.sqrt(1 + builtin.BATCH_NORM_EPSILON)  # of statistics as they begin
    np.testing.assert_allclose(model(image), scale * image[:, ::strides, ::strides], rtol=1e-6)


def test_kernels_decay_and_nothing_else_does():
    x = keras.Input((4, 4, 1))
    model = keras.Model(x, builtin.classify(builtin.convolve(x, 2, 3), 2))
    squares = sum(np.sum(np.square(v)) for v in model.trainable_variables if "kernel" in v.path)
    np.testing.assert_allclose(sum(model.losses), 0.5e-4 * squares, rtol=1e-6)
