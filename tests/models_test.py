"""The built-in models and the user's own."""

import sys

import keras
import numpy as np
import pytest

from towers import models


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda text: (tmp_path / "user_model.py").write_text(text)
    sys.modules.pop("user_model", None)


def refusal(name):
    with pytest.raises(ValueError) as caught:
        models.load(name)
    message = str(caught.value)
    assert "--model" in message and repr(name) in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    "name, num_parameters, optimizer",
    [
        ("cnn", 1_199_882, "adam"),
        # convolutions 320 + 73,984 + 295,040, normalization 4 x 256, dense 1,982,592 + 1,290
        ("notebook_cnn", 2_354_250, "rmsprop"),
        # 785 x 2048 + 2049 x 2048 + 2049 x 10
        ("mlp", 5_824_522, "adam"),
    ],
)
def test_model_has_its_published_parameters_and_optimizer(name, num_parameters, optimizer):
    source = models.load(name)
    model = source.build(source.input_shape, source.num_classes)
    assert model.count_params() == num_parameters
    assert source.optimizer == optimizer
    assert source.name == model.name == name
    keras.optimizers.get(source.optimizer)


@pytest.mark.parametrize("name", models.NAMES)
def test_model_takes_other_shapes_and_gives_probabilities(name):
    model = models.load(name).build((12, 14, 3), 7)
    assert model.built and model.input_shape == (None, 12, 14, 3)
    x = np.random.default_rng(0).random((2, 12, 14, 3), np.float32)
    y = np.asarray(model(x))
    assert y.shape == (2, 7) and y.dtype == np.float32
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-5)  # float32 rounding of 7 additions


def test_cnn_has_the_layers_of_the_keras_example():
    model = models.load("cnn").build((28, 28, 1), 10)
    layers = [layer.__class__.__name__ for layer in model.layers]
    assert " ".join(layers) == "Conv2D Conv2D MaxPooling2D Dropout Flatten Dense Dropout Dense"


def test_notebook_cnn_normalizes_between_its_second_and_third_convolution():
    model = models.load("notebook_cnn").build((28, 28, 1), 10)
    layers = [layer.__class__.__name__ for layer in model.layers]
    assert layers[:4] == ["Conv2D", "Conv2D", "BatchNormalization", "Conv2D"]


def test_user_function_comes_with_its_module_constants(user_module):
    user_module(
        "INPUT_SHAPE = [4]\nNUM_CLASSES = 3\nOPTIMIZER = 'sgd'\n"
        "def build(input_shape, num_classes): return (input_shape, num_classes)"
    )
    source = models.load("user_model:build")
    assert source[2:] == ((4,), 3, "sgd")
    assert source.build((4,), 3) == ((4,), 3)
    assert source.name == "user_model:build"


def test_user_module_without_constants_gets_mnist_and_adam(user_module):
    user_module("def build(input_shape, num_classes): pass")
    assert models.load("user_model:build")[2:] == ((28, 28, 1), 10, "adam")


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
