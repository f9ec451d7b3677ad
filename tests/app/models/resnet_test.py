"""The residual networks for small images, and the choice by the images' size."""

import keras
import numpy as np
import pytest

from towers.app import models
from towers.app.models import resnet


def convolutions(model):
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]


@pytest.mark.parametrize("name, num_parameters", [
    # Trainable ones. He et al., table 6: 0.27M and 0.85M; 16-channel convolutions 432 + 6n x 2,304
    # and so on, dense 650.
    ("resnet20", 269_722), ("resnet56", 853_018),
])
def test_small_residual_network_has_its_published_parameters(name, num_parameters):
    source = models.load(name)
    assert (source.input_shape, source.num_classes) == ((32, 32, 3), 10)
    model = source.build((32, 32, 3), 10)
    assert model.name == name
    assert sum(v.value.shape.num_elements() for v in model.trainable_variables) == num_parameters


@pytest.mark.parametrize("name, depth", [("resnet20", 20), ("resnet56", 56)])
def test_small_residual_network_has_its_depth_and_16_32_64_filters(name, depth):
    layers = convolutions(models.load(name).build((32, 32, 3), 10))
    assert len(layers) + 1 == depth
    assert [layer.filters for layer in layers] == [16] + [
        filters for filters in (16, 32, 64) for _ in range((depth - 2) // 3)
    ]
    assert layers[-1].output.shape == (None, 8, 8, 64)


def test_resnet_is_resnet20_below_64_pixels_and_resnet50_from_there_on():
    build = models.load("resnet").build
    assert [build(shape, 3).name for shape in ((64, 63, 1), (64, 64, 1))] == [
        "resnet20", "resnet50"
    ]


def test_shortcut_takes_every_second_pixel_and_adds_zeros():
    """Traced by hand: with its convolutions at zero, a network is its shortcuts."""
    model = resnet.build_small("small", (4, 6, 1), 2, num_blocks=1)
    for layer in convolutions(model)[1:]:
        layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
    x = np.random.default_rng(0).random((2, 4, 6, 1), np.float32)
    first, last = (keras.Model(model.input, layer.output) for layer in (
        next(layer for layer in model.layers if isinstance(layer, keras.layers.ReLU)),
        [layer for layer in model.layers if isinstance(layer, keras.layers.ReLU)][-1],
    ))
    expected = np.zeros((2, 1, 2, 64), np.float32)
    expected[..., :16] = np.asarray(first(x))[:, ::4, ::4]
    np.testing.assert_array_equal(last(x), expected)
    assert expected.any()
