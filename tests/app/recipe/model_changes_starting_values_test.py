"""A model that begins with the values of a file: by name and shape, and what was not found."""

import keras
import numpy as np
import pytest

from tests.app.run_test import normalized_model
from towers.app.config import TrainConfig
from towers.app.recipe.model_changes import take_values


@pytest.fixture(name="file", scope="module")
def _file(tmp_path_factory):
    """A model for 3 classes, its values all 7."""
    path = tmp_path_factory.mktemp("saved") / "saved.keras"
    model = normalized_model((3,), 3)
    for variable in model.weights:
        variable.assign(np.full(variable.shape, 7.0))
    model.save(path)
    return str(path)


def test_variables_of_the_same_name_and_shape_are_found_and_the_others_listed(file):
    """A head for 5 classes; the statistics of BatchNormalization are taken, too."""
    for classes, left in ((3, ""), (5, "; not found in it: head/kernel [8, 5], head/bias [5]")):
        model = normalized_model((3,), classes)
        text = take_values(model, TrainConfig(init_from=file))
        found = [bool((v.numpy() == 7).all()) for v in model.weights]
        assert found == [True] * 6 + [not left] * 2
        assert text == f"{sum(found)} of 8 variables begin with the values in {file}{left}"


def test_names_inside_of_another_model_are_found(file):
    inner = normalized_model((3,), 3)
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")])
    assert take_values(model, TrainConfig(init_from=file)).startswith("8 of 10 ")


def test_a_file_without_anything_of_the_model_and_a_missing_one_are_refused(file):
    """A run that goes on has its values in its checkpoint."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="other")])
    with pytest.raises(ValueError, match=r"init_from \(.*holds body/kernel \[3, 8\].* other/kern"):
        take_values(model, TrainConfig(init_from=file))
    with pytest.raises(ValueError, match="none.keras.* does not exist; name a file of model.save"):
        take_values(model, TrainConfig(init_from="none.keras"))
    assert take_values(model, TrainConfig(init_from="none.keras", resume="run")) is None
