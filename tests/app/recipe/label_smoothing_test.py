"""Smoothed labels: Keras' CategoricalCrossentropy on one-hot labels, from integers."""

import keras
import numpy as np
import pytest

from towers.app.recipe.label_smoothing import smoothed


@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 4)], ids=str)
@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.usefixtures("float64")
def test_it_is_keras_crossentropy_of_one_hot_labels(shape, from_logits):
    """Also of a sequence of labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, shape)
    flat = labels[..., 0] if shape[-1] == 1 else labels
    predictions = rng.uniform(0.1, 1.0, (*flat.shape, 3))
    predictions /= predictions.sum(axis=-1, keepdims=True)
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits, reduction="sum")
    weight = rng.uniform(size=flat.shape)
    theirs = keras.losses.CategoricalCrossentropy(from_logits, label_smoothing=0.1, reduction="sum")
    np.testing.assert_allclose(
        smoothed(sparse, 0.1)(labels, predictions, sample_weight=weight),
        theirs(np.eye(3)[flat], predictions, sample_weight=weight),
        rtol=1e-12,
    )


def test_one_hot_labels_take_keras_own_and_without_smoothing_any_loss_stays():
    for loss in ("categorical_crossentropy", keras.losses.CategoricalCrossentropy()):
        found = smoothed(loss, 0.2)
        assert type(found) is keras.losses.CategoricalCrossentropy
        assert found.label_smoothing == 0.2
    assert smoothed("mse", None) == "mse"


@pytest.mark.parametrize("loss", [
    "mse", keras.losses.SparseCategoricalCrossentropy(ignore_class=0), lambda y, p: p, None,
])
def test_losses_that_know_no_classes_are_refused(loss):
    with pytest.raises(ValueError, match=r"^label_smoothing \(0.1\) is for sparse"):
        smoothed(loss, 0.1)
