"""A model that begins with the values of a file: by name and shape, and what was not found."""

import keras
import numpy as np
import pytest

from tests.everyday import named_model
from towers.app.config import TrainConfig
from towers.app.recipe.starting_values import check_file, take_values


@pytest.fixture(name="file", scope="module")
def _file(tmp_path_factory):
    """A model for 3 classes, its values all 7."""
    path = tmp_path_factory.mktemp("saved") / "saved.keras"
    model = named_model((3,), 3)
    for variable in model.weights:
        variable.assign(np.full(variable.shape, 7.0))
    model.save(path)
    return str(path)


def is_sevens(variable):
    return bool((variable.numpy() == 7).all())


def test_all_variables_of_the_same_model_are_found(file):
    model = named_model((3,), 3)
    text = take_values(model, TrainConfig(init_from=file))
    assert text == f"8 of 8 variables begin with the values in {file}"
    assert all(map(is_sevens, model.weights))


def test_another_shape_is_left_and_listed(file):
    """A head for 5 classes; the statistics of BatchNormalization are taken, too."""
    model = named_model((3,), 5)
    text = take_values(model, TrainConfig(init_from=file))
    assert text.endswith(f"{file}; not found in it: head/kernel [8, 5], head/bias [5]")
    assert [is_sevens(v) for v in model.weights] == [True] * 6 + [False] * 2


def test_names_inside_of_another_model_are_found(file):
    inner = named_model((3,), 3)
    model = keras.Sequential([keras.Input((3,)), inner, keras.layers.Dense(2, name="top")])
    assert take_values(model, TrainConfig(init_from=file)).startswith("8 of 10 ")


def test_a_file_with_nothing_of_the_model_is_refused(file):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="other")])
    with pytest.raises(ValueError, match=r"init_from \(.*holds body/kernel \[3, 8\].* other/kern"):
        take_values(model, TrainConfig(init_from=file))


def test_a_missing_file_is_refused_but_for_a_run_that_goes_on(tmp_path):
    model, path = named_model((3,), 3), str(tmp_path / "none.keras")
    with pytest.raises(ValueError, match="is no file; name a .keras file"):
        take_values(model, TrainConfig(init_from=path))
    resumed = TrainConfig(init_from=path, resume="run")
    assert take_values(model, resumed) is None
    with pytest.raises(ValueError, match="is no file"):
        check_file(resumed)
