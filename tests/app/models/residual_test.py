"""What the residual networks share."""

import keras
import numpy as np
import pytest

from towers.app import models
from towers.app.models import residual


@pytest.mark.parametrize("name", ["resnet", "resnet20", "resnet56", "resnet50"])
def test_residual_network_refuses_what_is_no_image(name):
    with pytest.raises(ValueError, match=rf"model={name} needs images .*\(49,\)"):
        models.load(name).build((49,), 10)


@pytest.mark.parametrize("size, strides", [(3, 1), (3, 2), (1, 2), (7, 2)])
def test_a_convolutions_windows_are_centred_on_the_pixels_that_a_shortcut_takes(size, strides):
    """A window that is 1 at its centre alone hands these pixels on."""
    x = keras.Input((6, 8, 1))
    model = keras.Model(x, residual.convolve(x, 1, size, strides, relu=False))
    (kernel,) = [layer.kernel for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    window = np.zeros((size, size, 1, 1), np.float32)
    window[size // 2, size // 2] = 1
    kernel.assign(window)
    image = np.random.default_rng(0).normal(size=(2, 6, 8, 1)).astype(np.float32)
    scale = 1 / np.sqrt(1 + residual.BATCH_NORM_EPSILON)  # of statistics as they begin
    np.testing.assert_allclose(model(image), scale * image[:, ::strides, ::strides], rtol=1e-6)


def test_the_ends_are_sums_and_means_as_computed_by_hand():
    a, b = np.float32([[-3.0, 1.0]]), np.float32([[1.0, 1.0]])
    np.testing.assert_array_equal(residual.add_shortcut(a, b), [[0.0, 2.0]])
    x = keras.Input((2, 2, 3))
    model = keras.Model(x, residual.classify(x, 3))
    model.layers[-1].kernel.assign(np.eye(3))
    image = np.zeros((1, 2, 2, 3), np.float32)
    image[0, 0, 0] = 4 * np.log([1.0, 2.0, 5.0])  # its mean over 4 pixels is the logarithm
    np.testing.assert_allclose(model(image), [[0.125, 0.25, 0.625]], rtol=1e-6)


def test_kernels_decay_and_nothing_else_does():
    x = keras.Input((4, 4, 1))
    model = keras.Model(x, residual.classify(residual.convolve(x, 2, 3), 2))
    squares = sum(np.sum(np.square(v)) for v in model.trainable_variables if "kernel" in v.path)
    np.testing.assert_allclose(sum(model.losses), 0.5e-4 * squares, rtol=1e-6)
