"""The convolutional network of Keras' MNIST example."""

from towers.app import models


def test_cnn_has_its_published_parameters_and_optimizer():
    source = models.load("cnn")
    model = source.build(source.input_shape, source.num_classes)
    # convolutions 320 and 18,496, dense 9,216 x 128 + 128 and 1,290
    assert model.count_params() == 1_199_882
    assert source.optimizer == "adam"


def test_cnn_has_the_layers_of_the_keras_example():
    model = models.load("cnn").build((28, 28, 1), 10)
    layers = [layer.__class__.__name__ for layer in model.layers]
    assert " ".join(layers) == "Conv2D Conv2D MaxPooling2D Dropout Flatten Dense Dropout Dense"
