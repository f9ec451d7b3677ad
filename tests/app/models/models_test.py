"""Models by name: what holds for every built-in one, and the user's own; residual networks."""

import functools
import re
import sys

import keras
import numpy as np
import pytest

from towers.app import models
from towers.app.models import builtin

NOTES = ((49, 128), 128)
# (name, input_shape and num_classes, trainable parameters as published, optimizer, kinds of layers)
PUBLISHED = [
    (
        "cnn",
        ((28, 28, 1), 10),
        320 + 18_496 + 9_217 * 128 + 1_290,
        "adam",
        "Conv2D Conv2D MaxPooling2D Dropout Flatten Dense Dropout Dense",
    ),
    (
        "notebook_cnn",
        ((28, 28, 1), 10),
        2_354_250 - 512,
        "rmsprop",
        "Conv2D Conv2D BatchNormalization Conv2D MaxPooling2D Dropout Flatten Dense Dropout Dense",
    ),
    (
        "mlp",
        ((28, 28, 1), 10),
        785 * 2048 + 2049 * 2048 + 20_490,
        "adam",
        "Flatten Dense Dense Dense",
    ),
    (
        "gru",
        NOTES,
        768 * (128 + 256 + 2 + 514) + 257 * 512 + 513 * 128,
        "adam",
        "Reshape GRU Dropout GRU Dropout Dense Dropout Dense",
    ),
    ("gru_large", NOTES, 3072 * (1154 + 3 * 2050) + 1025 * 512 + 513 * 128, "adam", None),
    (
        "lstm",
        NOTES,
        1024 * (128 + 256 + 1 + 513) + 257 * 512 + 513 * 128,
        "adam",
        "Reshape LSTM Dropout LSTM Dropout Dense Dropout Dense",
    ),
    ("lstm_large", NOTES, 4096 * (1153 + 3 * 2049) + 1025 * 512 + 513 * 128, "adam", None),
    ("resnet20", ((32, 32, 3), 10), 269_722, "adam", None),  # He et al., table 6: 0.27M and 0.85M
    ("resnet56", ((32, 32, 3), 10), 853_018, "adam", None),
    ("resnet50", ((224, 224, 3), 1000), 25_557_032, "adam", None),  # torchvision's documentation
]
LARGE = ("gru_large", "lstm_large")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda text: (tmp_path / "user_model.py").write_text(text)
    sys.modules.pop("user_model", None)


@functools.cache
def built(name, input_shape, num_classes):
    return models.load(name).build(input_shape, num_classes)


@pytest.mark.telling("*cnn-*", "mlp-*", "gru*", "lstm-*", "resnet20-*", "resnet50-*")
@pytest.mark.parametrize("name, sizes, num_parameters, optimizer, kinds", PUBLISHED)
def test_a_built_in_model_has_its_published_parameters(
    name, sizes, num_parameters, optimizer, kinds, monkeypatch
):
    if name in (*LARGE, "resnet50"):  # their values take seconds
        for kind in keras.initializers.Orthogonal, keras.initializers.VarianceScaling:
            monkeypatch.setattr(
                kind, "__call__", lambda self, shape, dtype=None: keras.ops.zeros(shape, dtype)
            )
    source = models.load(name)
    assert (source.name, source[2:4], source.optimizer) == (name, sizes, optimizer)
    model = built(name, *sizes)
    assert model.name == name
    assert sum(v.value.shape.num_elements() for v in model.trainable_variables) == num_parameters
    assert kinds in (None, " ".join(type(layer).__name__ for layer in model.layers))


@pytest.mark.parametrize("name", ["notebook_cnn", "mlp", "gru"])
def test_a_model_takes_other_shapes_and_gives_probabilities(name):
    model = models.load(name).build((12, 14, 3), 7)
    assert model.built and model.input_shape == (None, 12, 14, 3)
    y = np.asarray(model(np.random.default_rng(0).random((2, 12, 14, 3), np.float32)))
    assert y.shape == (2, 7) and y.dtype == np.float32
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-5)  # float32 rounding of 7 additions


def test_a_recurrent_model_encodes_notes_one_hot_itself_and_reads_images_row_by_row():
    notes = np.random.default_rng(0).integers(0, 20, (3, 7))
    build = models.load("gru").build
    from_notes, from_vectors = build((7,), 20), build((7, 20), 20)
    from_vectors.set_weights(from_notes.get_weights())
    assert from_notes.inputs[0].dtype == "int32"
    one_hot = np.eye(20, dtype=np.float32)[notes]
    np.testing.assert_array_equal(from_notes(notes), from_vectors(one_hot))
    assert build((1,), 20)(np.ones((3, 1), np.int32)).shape == (3, 20)
    assert build((12, 14, 3), 20).layers[1].input.shape == (None, 12, 42)


@pytest.mark.parametrize("name", ["gru", "resnet20"])  # resnet50 has no other operations
def test_a_saved_model_loads_without_towers(name, tmp_path):
    """Its file names Keras' own layers and operations alone."""
    shape = (9,) if name == "gru" else (32, 32, 3)
    model = built(name, shape, 10)
    assert "towers" not in model.to_json()
    model.save(tmp_path / "model.keras")
    x = np.arange(18).reshape(2, 9) % 10 if name == "gru" else np.ones((2, *shape), np.float32)
    loaded = models.load(str(tmp_path / "model.keras")).build(None, None)
    np.testing.assert_array_equal(loaded(x), model(x))


class Mixes(keras.layers.Layer):
    """Not registered."""

    def call(self, x):
        return x


def test_a_file_that_keras_cannot_read_is_refused_in_one_line(tmp_path):
    (tmp_path / "model.keras").write_text("not a model")
    keras.Sequential([keras.Input((2,)), Mixes()]).save(tmp_path / "mixes.keras")
    for name, said in (
        ("model.keras", "cannot be .*: it is damaged"),
        ("missing.keras", "does not exist"),
        ("mixes.keras", "cannot be .*: Could not locate class 'Mixes'. "),
    ):
        with pytest.raises(ValueError, match=rf"^init_from \(.*{name}\) {said}[^\n]*$"):
            models.load_file(tmp_path / name, "init_from")


def test_a_users_function_comes_with_its_modules_constants_or_those_of_mnist(user_module):
    user_module(
        "INPUT_SHAPE = [4]\nNUM_CLASSES = 3\nOPTIMIZER = 'sgd'\n"
        "def build(input_shape, num_classes): return (input_shape, num_classes)"
    )
    source = models.load("user_model:build")
    assert source.build((4,), 3) == ((4,), 3)
    assert (source.name, *source[2:]) == ("user_model:build", (4,), 3, "sgd", False)
    del sys.modules["user_model"]
    user_module("def build(): return 'made'")
    source = models.load("user_model:build")
    assert source.build(None, None) == "made"
    assert source[2:] == ((28, 28, 1), 10, "adam", True)


@pytest.mark.parametrize("constant", ["INPUT_SHAPE = (0,)", "NUM_CLASSES = 2.5", "OPTIMIZER = 3"])
def test_a_constant_of_another_kind_is_refused(user_module, constant):
    user_module(f"{constant}\ndef build(input_shape, num_classes): pass")
    name, _, value = constant.partition(" = ")
    message = rf"model \('user_model:build'\).*{name} {re.escape(f'({value})')}"
    with pytest.raises(ValueError, match=message):
        models.load("user_model:build")


def test_an_unknown_model_is_refused():
    message = (
        "'notebok_cnn'.*one of cnn, notebook_cnn, mlp, .*package.module:function.* 'notebook_cnn'?"
    )
    with pytest.raises(ValueError, match=rf"^model \({message}"):
        models.load("notebok_cnn")


def test_built_in_models_take_channels_last_whatever_keras_json_says():
    keras.config.set_image_data_format("channels_first")
    try:
        model = models.load("cnn").build((28, 28, 1), 10)
        assert keras.config.image_data_format() == "channels_first"
    finally:
        keras.config.set_image_data_format("channels_last")
    assert model(np.zeros((2, 28, 28, 1), "float32")).shape == (2, 10)


# Residual networks: convolutions, shortcuts and ends, and the choice by image size
def layers_of(model, kind):
    return [layer for layer in model.layers if isinstance(layer, kind)]


@pytest.mark.parametrize("name", ["resnet20", "resnet50"])
def test_what_is_no_image_is_refused(name):
    with pytest.raises(ValueError, match=rf"model={name}\w* needs images .*\(49,\)"):
        models.load(name).build((49,), 10)


def test_resnet_is_resnet20_below_64_pixels_and_resnet50_from_there_on(monkeypatch):
    for name in "resnet20", "resnet50":
        monkeypatch.setattr(builtin, name, lambda *arguments, name=name: name)
    build = models.load("resnet").build
    assert [build(shape, 3) for shape in ((64, 63, 1), (64, 64, 1))] == ["resnet20", "resnet50"]


def test_resnet50_has_its_strides_in_the_3x3_convolutions():
    layers = layers_of(built("resnet50", (224, 224, 3), 1000), keras.layers.Conv2D)
    assert len(layers) == 53  # 49, and 4 shortcuts'
    strided = [
        (layer.kernel_size[0], layer.output.shape[1:])
        for layer in layers
        if layer.strides == (2, 2)
    ]
    assert strided == [
        (7, (112, 112, 64)),
        (3, (28, 28, 128)),
        (1, (28, 28, 512)),  # a block, and its shortcut
        (3, (14, 14, 256)),
        (1, (14, 14, 1024)),
        (3, (7, 7, 512)),
        (1, (7, 7, 2048)),
    ]


def test_blocks_of_resnet50_begin_as_their_shortcuts():
    model = builtin.build_bottlenecks("small", (64, 64, 3), 10, num_blocks=(2,), filters=4)
    zeros = [not np.any(layer.gamma) for layer in layers_of(model, keras.layers.BatchNormalization)]
    # first convolution | block: 3, then its shortcut | block
    assert zeros == [False, *(False, False, True, False), *(False, False, True)]


def test_a_shortcut_takes_every_second_pixel_and_adds_zeros():
    """Traced by hand: with its convolutions at zero, a network is its shortcuts."""
    model = builtin.build_small("small", (4, 6, 1), 2, num_blocks=1)
    for layer in layers_of(model, keras.layers.Conv2D)[1:]:
        layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
    x = np.random.default_rng(0).random((2, 4, 6, 1), np.float32)
    outputs = [layer.output for layer in layers_of(model, keras.layers.ReLU)]
    first, last = keras.Model(model.input, [outputs[0], outputs[-1]])(x)
    expected = np.zeros((2, 1, 2, 64), np.float32)
    expected[..., :16] = np.asarray(first)[:, ::4, ::4]
    np.testing.assert_array_equal(last, expected)
    assert expected.any()


@pytest.mark.parametrize("size, strides", [(3, 1), (7, 2)])
def test_a_convolutions_windows_are_centred_on_the_pixels_that_a_shortcut_takes(size, strides):
    """A window that is 1 at its centre alone hands these pixels on."""
    x = keras.Input((6, 8, 1))
    model = keras.Model(x, builtin.convolve(x, 1, size, strides, relu=False))
    window = np.zeros((size, size, 1, 1), np.float32)
    window[size // 2, size // 2] = 1
    layers_of(model, keras.layers.Conv2D)[0].kernel.assign(window)
    image = np.random.default_rng(0).normal(size=(2, 6, 8, 1)).astype(np.float32)
    scale = 1 / np.sqrt(1 + builtin.BATCH_NORM_EPSILON)  # of statistics as they begin
    np.testing.assert_allclose(model(image), scale * image[:, ::strides, ::strides], rtol=1e-6)


def test_kernels_decay_and_nothing_else_does():
    x = keras.Input((4, 4, 1))
    model = keras.Model(x, builtin.classify(builtin.convolve(x, 2, 3), 2))
    squares = sum(np.sum(np.square(v)) for v in model.trainable_variables if "kernel" in v.path)
    np.testing.assert_allclose(sum(model.losses), 0.5e-4 * squares, rtol=1e-6)
