"""Recurrent networks for melodies: GRU or LSTM layers read 49 notes and predict the next."""

import math
from collections.abc import Callable

import keras

# Layers, dense 512, L2 and Adam come from a benchmark of recurrent networks on several GPUs with
# cuDNN. Its size is `gru_large` and `lstm_large`; a CPU trains `gru` and `lstm` in minutes.
L2 = keras.regularizers.L2(1e-6)  # of all kernels
# On the non-recurrent connections alone: W. Zaremba, I. Sutskever, O. Vinyals, "Recurrent Neural
# Network Regularization", arXiv 1409.2329. The rate is towers' own choice.
DROPOUT = 0.2


def build(
    name: str, layer: Callable[..., keras.layers.Layer], input_shape: tuple[int, ...],
    num_classes: int, *, num_layers: int, units: int, dense_units: int = 512,
) -> keras.Model:
    """A built model that reads a sequence and predicts what comes next.

    The recurrent layers keep Keras' defaults (tanh, sigmoid, biases, no recurrent dropout, not
    unrolled; GRU: reset_after), which Keras computes with cuDNN on a GPU.

    Args:
        name: the model's name.
        layer: keras.layers.GRU or keras.layers.LSTM; `num_layers` of so many `units`.
        input_shape: (steps,): each a number 0 ... num_classes - 1, as the label is; the model
            encodes it one-hot, on the tower's own device, so that the input stays small. Or
            (steps, ...): one vector a step, such as an image's rows from top to bottom.
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        int32 [N, steps] or float32 [N, *input_shape] -> probabilities, float32 [N, num_classes].
    """
    steps, *step_shape = input_shape
    model = keras.Sequential(name=name)
    if step_shape:
        model.add(keras.Input(input_shape))
    else:
        step_shape = [num_classes]
        model.add(keras.Input(input_shape, dtype="int32"))
        model.add(keras.layers.CategoryEncoding(num_classes, output_mode="one_hot"))
    # CategoryEncoding drops the axis of a single step.
    model.add(keras.layers.Reshape((steps, math.prod(step_shape))))
    for index in range(num_layers):
        model.add(layer(
            units, return_sequences=index < num_layers - 1, kernel_regularizer=L2,
            recurrent_regularizer=L2,
        ))
        model.add(keras.layers.Dropout(DROPOUT))
    model.add(keras.layers.Dense(dense_units, activation="relu", kernel_regularizer=L2))
    model.add(keras.layers.Dropout(DROPOUT))
    model.add(keras.layers.Dense(num_classes, activation="softmax", kernel_regularizer=L2))
    return model
