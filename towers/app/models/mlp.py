"""A multilayer perceptron, 784-2048-2048-10 on MNIST: many parameters, little computation."""

import keras

INPUT_SHAPE = (28, 28, 1)
NUM_CLASSES = 10
OPTIMIZER = "adam"


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A built model, 5,824,522 parameters at (28, 28, 1) and 10 classes.

    The width of 2048 is towers' own choice: wide enough that averaging and update dominate.

    Args:
        input_shape: the shape of one example, of any rank; it is flattened.
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        float32 [N, *input_shape] -> probabilities, float32 [N, num_classes].
    """
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(2048, activation="relu"),
            keras.layers.Dense(2048, activation="relu"),
            keras.layers.Dense(num_classes, activation="softmax"),
        ],
        name="mlp",
    )
