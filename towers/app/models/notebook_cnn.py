"""The convnet of the Keras multi-GPU notebook: three wide convolutions, batch normalization."""

import keras

INPUT_SHAPE = (28, 28, 1)
NUM_CLASSES = 10
OPTIMIZER = "rmsprop"  # the notebook's


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A built model, 2,354,250 parameters at (28, 28, 1) and 10 classes.

    Layers, dropout rates and optimizer: the notebook, which reports a test accuracy of 0.989 to
    0.993 after 12 epochs at a per-tower batch of 128.

    Args:
        input_shape: (height, width, channels) of one image, at least (8, 8, 1).
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        float32 [N, height, width, channels] -> probabilities, float32 [N, num_classes].
    """
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(256, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Conv2D(128, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(num_classes, activation="softmax"),
        ],
        name="notebook_cnn",
    )
