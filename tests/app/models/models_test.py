"""Models by name: what holds for every built-in one, and the user's own."""

import sys

import keras
import numpy as np
import pytest

from towers.app import models


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda text: (tmp_path / "user_model.py").write_text(text)
    sys.modules.pop("user_model", None)


def refusal(name):
    with pytest.raises(ValueError) as caught:
        models.load(name)
    message = str(caught.value)
    assert message.startswith("model (") and repr(name) in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", models.NAMES)
def test_a_built_in_model_is_known_by_its_name_with_an_optimizer_of_keras(name):
    source = models.load(name)
    assert source.name == name
    keras.optimizers.get(source.optimizer)


@pytest.mark.parametrize("name", models.NAMES)
def test_model_takes_other_shapes_and_gives_probabilities(name):
    model = models.load(name).build((12, 14, 3), 7)
    assert model.built and model.input_shape == (None, 12, 14, 3)
    x = np.random.default_rng(0).random((2, 12, 14, 3), np.float32)
    y = np.asarray(model(x))
    assert y.shape == (2, 7) and y.dtype == np.float32
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-5)  # float32 rounding of 7 additions


@pytest.mark.parametrize("name", ["gru", "resnet20"])  # resnet50 has no other operations
def test_saved_model_loads_without_towers(name, tmp_path):
    """Its file names Keras' own layers and operations alone."""
    shape = (9,) if name == "gru" else (12, 12, 3)
    model = models.load(name).build(shape, 10)
    assert "towers" not in model.to_json()
    model.save(tmp_path / "model.keras")
    x = np.arange(18).reshape(2, 9) % 10 if name == "gru" else np.ones((2, *shape), np.float32)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))


def test_user_function_comes_with_its_module_constants(user_module):
    user_module(
        "INPUT_SHAPE = [4]\nNUM_CLASSES = 3\nOPTIMIZER = 'sgd'\n"
        "def build(input_shape, num_classes): return (input_shape, num_classes)"
    )
    source = models.load("user_model:build")
    assert source[2:5] == ((4,), 3, "sgd")
    assert source.build((4,), 3) == ((4,), 3)
    assert source.name == "user_model:build"


def test_user_module_without_constants_gets_mnist_and_adam(user_module):
    user_module("def build(input_shape, num_classes): pass")
    assert models.load("user_model:build")[2:5] == ((28, 28, 1), 10, "adam")


@pytest.mark.parametrize(
    "constant", ["INPUT_SHAPE = 784", "INPUT_SHAPE = (0,)", "NUM_CLASSES = 2.5", "OPTIMIZER = 3"]
)
def test_constant_of_another_kind_is_refused(user_module, constant):
    user_module(f"{constant}\ndef build(input_shape, num_classes): pass")
    assert constant.split()[0] in refusal("user_model:build")


def test_unknown_model_lists_the_names_the_nearest_and_the_form():
    message = refusal("notebok_cnn")
    assert "cnn, notebook_cnn, mlp" in message and "package.module:function" in message
    assert "Did you mean 'notebook_cnn'?" in message


def test_module_that_cannot_be_imported_is_refused_with_the_cause():
    assert "No module named 'no_such_module'" in refusal("no_such_module:build")


def test_missing_function_is_refused(user_module):
    user_module("")
    assert "has no function 'build'" in refusal("user_model:build")


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_built_in_models_take_channels_last_whatever_keras_json_says(name):
    before = keras.config.image_data_format()
    keras.config.set_image_data_format("channels_first")
    try:
        model = models.load(name).build((28, 28, 1), 10)
        assert keras.config.image_data_format() == "channels_first"
    finally:
        keras.config.set_image_data_format(before)
    assert model(np.zeros((2, 28, 28, 1), "float32")).shape == (2, 10)
