"""A recurrent network for melodies: LSTM layers read 49 notes and predict the next."""

import keras

from towers.app.models import recurrent

# 49 one-hot notes, as in the source. The music data set gives integers, (49,), which the model
# encodes itself.
INPUT_SHAPE = (49, 128)
NUM_CLASSES = 128
OPTIMIZER = "adam"  # the source's


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A built model, 2 layers x 256 units, 1,116,800 parameters for 49 notes of 128.

    The source's layers (see `build_large`), in a size that a CPU trains in minutes.

    Args:
        input_shape: (steps,) of integers, or (steps, ...) of numbers; see `recurrent.build`.
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        int32 [N, steps] or float32 [N, *input_shape] -> probabilities, float32 [N, num_classes].
    """
    return recurrent.build(
        "lstm", keras.layers.LSTM, input_shape, num_classes, num_layers=2, units=256
    )


def build_large(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """The source's size, 4 layers x 1024 units: `--model=towers.models.lstm:build_large`.

    30,491,264 parameters for 49 notes of 128. Layers, dense 512, L2 1e-6 and Adam: a benchmark of
    recurrent networks on several GPUs with cuDNN. Args and Returns: as of `build`.
    """
    return recurrent.build(
        "lstm_large", keras.layers.LSTM, input_shape, num_classes, num_layers=4, units=1024
    )
