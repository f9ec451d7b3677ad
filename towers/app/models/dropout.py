"""Sets the rate of a model's Dropout layers after the model is built."""

import keras

from towers.machine.keras_internals import all_layers, give_seed_generator

_DROPOUT_LAYERS = (  # spatial dropout layers are subclasses of Dropout
    keras.layers.Dropout, keras.layers.AlphaDropout, keras.layers.GaussianDropout
)
_ATTENTION_LAYERS = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def set_dropout(model: keras.Model, rate: float) -> None:
    """Sets the rate of every Dropout layer of a model, also of nested layers.

    It also sets `dropout` and `recurrent_dropout` of recurrent layers where they are above 0. It
    keeps a `recurrent_dropout` of 0, because Keras uses cuDNN only without it.

    Args:
        model: a built model that is not yet traced; it is changed in place.
        rate: the share of units that are dropped, from 0 (none) to below 1.

    Raises:
        ValueError: the model has no rate to set.
    """
    layers = all_layers(model)
    # If its rate was 0, an attention layer never calls the Dropout layer that it has made.
    unused = {
        id(inner) for layer in layers if isinstance(layer, _ATTENTION_LAYERS) and not layer.dropout
        for inner in all_layers(layer)
    }
    is_found = False
    for layer in layers:
        if isinstance(layer, _DROPOUT_LAYERS) and id(layer) not in unused:
            is_found, layer.rate = True, rate
            if rate > 0 and not hasattr(layer, "seed_generator"):  # made with a rate of 0
                give_seed_generator(layer, layer.seed)
        elif hasattr(layer, "get_dropout_mask"):  # recurrent cells have no public base class
            for name in ("dropout", "recurrent_dropout"):
                if getattr(layer, name):
                    is_found = True
                    setattr(layer, name, rate)
    if not is_found:
        raise ValueError(
            f"dropout ({rate}) has no effect: model {model.name!r} has no Dropout layer. Leave "
            "it out, or choose another `model`."
        )
