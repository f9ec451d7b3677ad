"""Builds recurrent networks for melodies: GRU or LSTM layers that predict a note from 49 notes."""

import math
from collections.abc import Callable

import keras

# Layers, dense 512, L2 and Adam come from a benchmark of recurrent networks on several GPUs with
# cuDNN. Its size is `gru_large` and `lstm_large`; a CPU trains `gru` and `lstm` in minutes.
L2 = keras.regularizers.L2(1e-6)  # for all kernels
# Dropout acts only on non-recurrent connections: W. Zaremba, I. Sutskever, O. Vinyals, "Recurrent
# Neural Network Regularization", arXiv 1409.2329. The rate is not from the paper.
DROPOUT = 0.2


def build(
    name: str, layer: Callable[..., keras.layers.Layer], input_shape: tuple[int, ...],
    num_classes: int, *, num_layers: int, units: int, dense_units: int = 512,
) -> keras.Model:
    """Builds a model that reads a sequence and predicts the next element.

    The recurrent layers keep Keras' defaults (tanh, sigmoid, biases, no recurrent dropout, not
    unrolled; GRU: reset_after), because Keras then uses cuDNN on a GPU.

    Args:
        name: the model's name.
        layer: keras.layers.GRU or LSTM; the model gets `num_layers` layers with `units` each.
        input_shape: (steps,) for numbers 0 ... num_classes - 1, which the model encodes one-hot on
            the tower's device, so that the input stays small; or (steps, ...) for one vector in
            each step, such as an image's rows from top to bottom.
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        A model: int32 [N, steps] or float32 [N, *input_shape] -> float32 [N, num_classes].
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
