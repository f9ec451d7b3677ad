"""Builds two convolutional networks for MNIST, and a multilayer perceptron.

Each function takes the shape of one example and the number of classes. It returns a built model:
float32 [N, *input_shape] -> probabilities, float32 [N, num_classes].
"""

import keras
from keras.layers import BatchNormalization, Conv2D, Dense, Dropout, Flatten, MaxPooling2D


def cnn(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds the Keras MNIST convnet, with 1,199,882 parameters at (28, 28, 1) and 10 classes.

    Source of layers and dropout rates: keras-team/keras 2.x, examples/mnist_cnn.py, which reaches a
    test accuracy of 0.9925 after 12 epochs at a global batch of 128. It used Adadelta at Keras
    2.0's learning rate of 1.0; Adam needs no such tuning. Images must be at least (6, 6, 1).
    """
    convolutions = [Conv2D(32, 3, activation="relu"), Conv2D(64, 3, activation="relu")]
    return _classifier("cnn", input_shape, num_classes, convolutions)


def notebook_cnn(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds the Keras multi-GPU notebook's convnet, with 2,354,250 parameters at (28, 28, 1).

    Source of layers, dropout rates and optimizer: the notebook, which reports a test accuracy of
    0.989 to 0.993 after 12 epochs with 128 examples a tower. Images must be at least (8, 8, 1).
    """
    convolutions = [
        Conv2D(32, 3, activation="relu"), Conv2D(256, 3, activation="relu"), BatchNormalization(),
        Conv2D(128, 3, activation="relu"),
    ]
    return _classifier("notebook_cnn", input_shape, num_classes, convolutions)


def mlp(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """Builds a perceptron of 784-2048-2048-10 units on MNIST, with 5,824,522 parameters.

    Its width makes averaging and update dominate a step. It flattens examples of any shape.
    """
    hidden = [Dense(2048, activation="relu"), Dense(2048, activation="relu")]
    return keras.Sequential([
        keras.Input(input_shape), Flatten(), *hidden, Dense(num_classes, activation="softmax"),
    ], name="mlp")


def _classifier(
    name: str, input_shape: tuple[int, ...], num_classes: int, convolutions: list
) -> keras.Model:
    return keras.Sequential([
        keras.Input(input_shape), *convolutions, MaxPooling2D(2), Dropout(0.25), Flatten(),
        Dense(128, activation="relu"), Dropout(0.5), Dense(num_classes, activation="softmax"),
    ], name=name)
