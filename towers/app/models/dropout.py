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
        ValueError: the model drops nothing that could be set.
    """
    layers = all_layers(model)
    # At a rate of 0, an attention layer does not call the Dropout layer that it has made.
    unused = {
        id(inner) for layer in layers if isinstance(layer, _ATTENTION_LAYERS) and not layer.dropout
        for inner in all_layers(layer)
    }
    is_found = False
    for layer in layers:
        if isinstance(layer, _DROPOUT_LAYERS) and id(layer) not in unused:
            is_found, layer.rate = True, rate
            if rate > 0 and not hasattr(layer, "seed_generator"):  # it was made with a rate of 0
                give_seed_generator(layer, layer.seed)
        elif hasattr(layer, "get_dropout_mask"):  # a recurrent cell: its base class is not public
            for name in ("dropout", "recurrent_dropout"):
                if getattr(layer, name):
                    is_found = True
                    setattr(layer, name, rate)
    if not is_found:
        raise ValueError(
            f"dropout ({rate}) has no effect: model {model.name!r} has no Dropout layer. Leave "
            "it out, or choose another `model`."
        )
