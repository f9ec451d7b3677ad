"""The rate of a model's Dropout layers, set after it is built."""

import keras

from towers.machine.keras_internals import all_layers, give_seed_generator

_DROPOUT_LAYERS = (  # the spatial ones are Dropout layers, too
    keras.layers.Dropout, keras.layers.AlphaDropout, keras.layers.GaussianDropout
)
_ATTENTION_LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def set_dropout(model: keras.Model, rate: float) -> None:
    """Sets the rate of every Dropout layer of a model, nested ones too; before it is traced.

    Also `dropout` and `recurrent_dropout` of recurrent layers, where they are above 0 (with
    `recurrent_dropout`, Keras could not use cuDNN any more).

    Args:
        model: a built model, changed in place.
        rate: of the units that are dropped, 0 (none) to below 1.

    Raises:
        ValueError: the rate is out of range, or the model drops nothing that could be set.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout ({rate}) must be a number from 0 to below 1, such as 0.25.")
    layers = all_layers(model)
    # An attention layer makes a Dropout layer of its own, which it leaves out at a rate of 0.
    unused = {
        id(inner)
        for layer in layers
        if isinstance(layer, _ATTENTION_LAYERS) and not layer.dropout
        for inner in all_layers(layer)
        if isinstance(inner, keras.layers.Dropout) and not inner.rate
    }
    dropouts = [
        layer
        for layer in layers
        if isinstance(layer, _DROPOUT_LAYERS) and id(layer) not in unused
    ]
    # What Keras' cells inherit is not public; its methods tell it.
    cells = [
        cell
        for cell in layers
        if hasattr(cell, "get_dropout_mask") and (cell.dropout or cell.recurrent_dropout)
    ]
    if not dropouts and not cells:
        raise ValueError(
            f"dropout ({rate}) has no effect: model {model.name!r} has no Dropout layer. Leave "
            "it out, or choose another `model`."
        )
    for layer in dropouts:
        _set_rate(layer, rate)
    for cell in cells:
        if cell.dropout:
            cell.dropout = rate
        if cell.recurrent_dropout:
            cell.recurrent_dropout = rate


def _set_rate(layer: keras.layers.Layer, rate: float) -> None:
    layer.rate = rate
    if rate > 0 and not hasattr(layer, "seed_generator"):  # it was made with a rate of 0
        give_seed_generator(layer, layer.seed)
