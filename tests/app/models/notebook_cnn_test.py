"""The notebook's convolutional network."""

from towers.app import models


def test_notebook_cnn_has_its_published_parameters_and_optimizer():
    source = models.load("notebook_cnn")
    model = source.build(source.input_shape, source.num_classes)
    # convolutions 320 + 73,984 + 295,040, normalization 4 x 256, dense 1,982,592 + 1,290
    assert model.count_params() == 2_354_250
    assert source.optimizer == "rmsprop"


def test_notebook_cnn_normalizes_between_its_second_and_third_convolution():
    model = models.load("notebook_cnn").build((28, 28, 1), 10)
    layers = [layer.__class__.__name__ for layer in model.layers]
    assert layers[:4] == ["Conv2D", "Conv2D", "BatchNormalization", "Conv2D"]
