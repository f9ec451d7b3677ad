"""The multilayer perceptron."""

import keras

from towers.app import models


def test_mlp_has_its_published_parameters_and_optimizer():
    source = models.load("mlp")
    model = source.build(source.input_shape, source.num_classes)
    # 785 x 2048 + 2049 x 2048 + 2049 x 10
    assert model.count_params() == 5_824_522
    assert source.optimizer == "adam"


def test_mlp_takes_examples_of_any_shape_as_one_row():
    layers = models.load("mlp").build((12, 14, 3), 7).layers
    widths = [layer.kernel.shape for layer in layers if isinstance(layer, keras.layers.Dense)]
    assert widths == [(12 * 14 * 3, 2048), (2048, 2048), (2048, 7)]
