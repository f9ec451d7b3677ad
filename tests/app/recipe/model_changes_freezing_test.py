"""Frozen layers: found by their variables' paths, frozen as in Keras."""

import keras
import numpy as np
import pytest

from tests.app.run_test import normalized_model
from towers.app.recipe.model_changes import freeze


@pytest.fixture(name="model")
def _model():
    return normalized_model((3,), 3)


def test_a_layer_normalizes_by_its_statistics_and_the_others_are_trained(model):
    assert freeze(model, "(^|/)norm/") == "2 of 6 trainable variables frozen, 16 parameters"
    assert [v.path.rpartition("/")[0].rpartition("/")[2] for v in model.trainable_variables] == [
        "body", "body", "head", "head"
    ]
    norm = model.get_layer("norm")
    assert not norm.trainable
    x = np.full((2, 8), 3.0, "float32")
    np.testing.assert_allclose(norm(x, training=True), x / np.sqrt(1.001), rtol=1e-5)


def test_layers_of_inner_models_are_found_too():
    inner = normalized_model((3,), 3)
    outer = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")])
    assert freeze(outer, "body|norm|head").startswith("6 of 8 ")
    assert [v.path.rpartition("top/")[2] for v in outer.trainable_variables] == ["kernel", "bias"]


@pytest.mark.parametrize("pattern, message", [
    ("bdy", r"^freeze \('bdy'\) is found in no .* 6, such as .*body/"),
    (".", "leaves no variable to train"),
    ("norm|body/bias", r"body/bias, and not in every variable .*Name whole layers, such as \^conv"),
])
def test_nothing_everything_and_parts_of_a_layer_are_refused(model, pattern, message):
    with pytest.raises(ValueError, match=message):
        freeze(model, pattern)
