"""Label smoothing for integer labels, for which Keras' crossentropy has none.

    label 2 of 4 classes, label_smoothing 0.1  ->  0.025  0.025  0.925  0.025
"""

from typing import Any

import keras

_PACKAGE = "towers"


@keras.saving.register_keras_serializable(package=_PACKAGE)
class SmoothedCrossentropy(keras.losses.Loss):
    """Keras' CategoricalCrossentropy(label_smoothing=...) of integer labels, one-hot.

    Source: Szegedy et al. 2016, Rethinking the Inception Architecture, section 7.
    """

    def __init__(
        self,
        label_smoothing: float,
        from_logits: bool = False,
        reduction: str = "sum_over_batch_size",
        name: str = "smoothed_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.label_smoothing, self.from_logits = label_smoothing, from_logits

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Args: integer labels [n, ...] or [n, ..., 1]; predictions [n, ..., classes]."""
        if len(y_true.shape) == len(y_pred.shape):
            y_true = keras.ops.squeeze(y_true, -1)
        labels = keras.ops.one_hot(
            keras.ops.cast(y_true, "int32"), y_pred.shape[-1], dtype=y_pred.dtype
        )
        return keras.losses.categorical_crossentropy(
            labels, y_pred, self.from_logits, self.label_smoothing
        )

    def get_config(self) -> dict[str, Any]:
        """See `keras.losses.Loss.get_config`."""
        own = {"label_smoothing": self.label_smoothing, "from_logits": self.from_logits}
        return {**super().get_config(), **own}


def smoothed(loss: Any, label_smoothing: float | None) -> Any:
    """The loss with that part of each label spread over all classes; None: the loss as it is.

    Args:
        loss: a crossentropy of classes, sparse or not: Keras' loss or its name.
        label_smoothing: from 0 to below 1.

    Raises:
        ValueError: it is another loss.
    """
    if label_smoothing is None:
        return loss
    losses = keras.losses
    named = {
        "sparse_categorical_crossentropy": losses.SparseCategoricalCrossentropy,
        "categorical_crossentropy": losses.CategoricalCrossentropy,
    }
    found = named[loss]() if isinstance(loss, str) and loss in named else loss
    config = found.get_config() if isinstance(found, losses.Loss) else {}
    if type(found) is losses.CategoricalCrossentropy:
        return type(found).from_config({**config, "label_smoothing": label_smoothing})
    if type(found) is losses.SparseCategoricalCrossentropy and config["ignore_class"] is None:
        return SmoothedCrossentropy(
            label_smoothing, config["from_logits"], config["reduction"], dtype=config.get("dtype")
        )
    name = getattr(found, "name", found)
    raise ValueError(
        f"label_smoothing ({label_smoothing}) is for sparse_categorical_crossentropy and "
        f"categorical_crossentropy, not for the loss {name!r}. Leave it out."
    )
