"""Frozen variables: found by their paths, layers as in Keras."""

import keras
import numpy as np
import pytest

from tests.everyday import named_model
from towers.app.recipe.freezing import freeze


@pytest.fixture(name="model")
def _model():
    return named_model((3,), 3)


def trainable(model):
    return [v.path.partition("/")[2] for v in model.trainable_variables]


def test_variables_are_found_by_their_paths(model):
    assert freeze(model, "body/bias|norm/gamma") == (
        "2 of 6 trainable variables frozen, 16 parameters"
    )
    assert trainable(model) == ["body/kernel", "norm/beta", "head/kernel", "head/bias"]
    assert model.get_layer("norm").trainable


def test_a_layer_that_is_found_whole_normalizes_by_its_statistics(model):
    freeze(model, "norm")
    norm = model.get_layer("norm")
    assert not norm.trainable
    x = np.full((2, 8), 3.0, "float32")
    np.testing.assert_allclose(norm(x, training=True), x / np.sqrt(1.001), rtol=1e-5)


def test_layers_of_inner_models_are_found_too():
    inner = named_model((3,), 3)
    outer = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")])
    assert freeze(outer, "body|norm|head").startswith("6 of 8 ")
    assert [v.path.rpartition("top/")[2] for v in outer.trainable_variables] == ["kernel", "bias"]


def test_nothing_found_and_everything_found_are_refused(model):
    with pytest.raises(ValueError, match=r"^freeze \('bdy'\) is found in no .* 6, such as .*body/"):
        freeze(model, "bdy")
    with pytest.raises(ValueError, match="leaves no variable to train"):
        freeze(model, ".")
