"""Adds label smoothing to Keras' crossentropy for integer labels, which lacks it.

    label 2 of 4 classes, label_smoothing 0.1  ->  0.025  0.025  0.925  0.025
"""

from typing import Any

import keras
from keras.losses import CategoricalCrossentropy, SparseCategoricalCrossentropy

_NAMED = {
    "sparse_categorical_crossentropy": SparseCategoricalCrossentropy,
    "categorical_crossentropy": CategoricalCrossentropy,
}


class SmoothedCrossentropy(CategoricalCrossentropy):
    """Computes Keras' CategoricalCrossentropy(label_smoothing=...) for integer labels.

    Source: Szegedy et al. 2016, Rethinking the Inception Architecture, section 7.
    """

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns losses [n, ...] of y_true [n, ...] or [n, ..., 1], y_pred [n, ..., classes]."""
        if len(y_true.shape) == len(y_pred.shape):
            y_true = keras.ops.squeeze(y_true, -1)
        classes = keras.ops.cast(y_true, "int32")
        labels = keras.ops.one_hot(classes, y_pred.shape[-1], dtype=y_pred.dtype)
        return super().call(labels, y_pred)


def smoothed(loss: Any, label_smoothing: float | None) -> Any:
    """Returns a loss that spreads `label_smoothing` of each label over all classes, unless None.

    Raises ValueError unless `loss` is Keras' categorical or sparse crossentropy, or its name.
    """
    if label_smoothing is None:
        return loss
    found = _NAMED[loss]() if isinstance(loss, str) and loss in _NAMED else loss
    config = found.get_config() if type(found) in _NAMED.values() else {}
    ignores = config.pop("ignore_class", None)
    smooth = {**config, "label_smoothing": label_smoothing}
    if type(found) is CategoricalCrossentropy:
        return CategoricalCrossentropy.from_config(smooth)
    if type(found) is SparseCategoricalCrossentropy and ignores is None:
        return SmoothedCrossentropy.from_config(smooth)
    raise ValueError(
        f"label_smoothing ({label_smoothing}) is for sparse_categorical_crossentropy and "
        f"categorical_crossentropy, not for the loss {getattr(found, 'name', found)!r}. Leave it "
        "out."
    )
