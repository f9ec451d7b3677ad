"""The Keras MNIST convnet: two convolutions, one pooling, one hidden dense layer."""

import keras

INPUT_SHAPE = (28, 28, 1)
NUM_CLASSES = 10
# mnist_cnn.py used Adadelta at Keras 2.0's learning rate of 1.0; Adam needs no such tuning.
OPTIMIZER = "adam"


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A built model, 1,199,882 parameters at (28, 28, 1) and 10 classes.

    Layers and dropout rates: keras-team/keras 2.x, examples/mnist_cnn.py, which reaches a test
    accuracy of 0.9925 after 12 epochs at a global batch of 128.

    Args:
        input_shape: (height, width, channels) of one image, at least (6, 6, 1).
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        float32 [N, height, width, channels] -> probabilities, float32 [N, num_classes].
    """
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(num_classes, activation="softmax"),
        ],
        name="cnn",
    )
