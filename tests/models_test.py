"""The built-in models and the user's own."""

import sys

import keras
import numpy as np
import pytest

from towers import models
from towers.models import resnet, resnet50


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
        # 3 x 256 x (128 + 256 + 2), 3 x 256 x (256 + 256 + 2), dense 257 x 512 + 513 x 128
        ("gru", 888_448, "adam"),
        # 4 x 256 x (128 + 256 + 1), 4 x 256 x (256 + 256 + 1), dense 257 x 512 + 513 x 128
        ("lstm", 1_116_800, "adam"),
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


@pytest.mark.parametrize(
    "name, shape, classes, num_parameters",
    [
        # Trainable ones. He et al., table 6: 0.27M and 0.85M; 16-channel convolutions 432 + 6n x
        # 2,304 and so on, dense 650. ResNet-50: torchvision's documentation.
        ("resnet20", (32, 32, 3), 10, 269_722),
        ("resnet56", (32, 32, 3), 10, 853_018),
        ("resnet50", (224, 224, 3), 1000, 25_557_032),
    ],
)
def test_residual_network_has_its_published_parameters(name, shape, classes, num_parameters):
    source = models.load(name)
    assert (source.input_shape, source.num_classes) == (shape, classes)
    model = source.build(shape, classes)
    assert model.name == name
    assert sum(v.value.shape.num_elements() for v in model.trainable_variables) == num_parameters


def convolutions(model):
    return [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]


@pytest.mark.parametrize("name, depth", [("resnet20", 20), ("resnet56", 56)])
def test_small_residual_network_has_its_depth_and_16_32_64_filters(name, depth):
    layers = convolutions(models.load(name).build((32, 32, 3), 10))
    assert len(layers) + 1 == depth
    assert [layer.filters for layer in layers] == [16] + [
        filters for filters in (16, 32, 64) for _ in range((depth - 2) // 3)
    ]
    assert layers[-1].output.shape == (None, 8, 8, 64)


def test_resnet50_has_its_strides_in_the_3x3_convolutions():
    layers = convolutions(models.load("resnet50").build((224, 224, 3), 1000))
    assert len(layers) == 53  # 49, and 4 shortcuts'
    strided = [(layer.kernel_size[0], layer.output.shape[1:]) for layer in layers
               if layer.strides == (2, 2)]
    assert strided == [
        (7, (112, 112, 64)),
        (3, (28, 28, 128)), (1, (28, 28, 512)),  # a block, and its shortcut
        (3, (14, 14, 256)), (1, (14, 14, 1024)),
        (3, (7, 7, 512)), (1, (7, 7, 2048)),
    ]


def test_resnet50s_blocks_begin_as_their_shortcuts():
    model = resnet50.build_bottlenecks("small", (64, 64, 3), 10, num_blocks=(2, 1), filters=4)
    zeros = [not np.any(layer.gamma) for layer in model.layers
             if isinstance(layer, keras.layers.BatchNormalization)]
    # first convolution | block: 3, then its shortcut | block | block with its shortcut
    assert zeros == [False, *(False, False, True, False), *(False, False, True),
                     *(False, False, True, False)]


def test_resnet_is_resnet20_below_64_pixels_and_resnet50_from_there_on():
    build = models.load("resnet").build
    assert [build(shape, 3).name for shape in ((64, 63, 1), (64, 64, 1))] == [
        "resnet20", "resnet50"
    ]


@pytest.mark.parametrize("name", ["resnet", "resnet20", "resnet56", "resnet50"])
def test_residual_network_refuses_what_is_no_image(name):
    with pytest.raises(ValueError, match=rf"--model={name} needs images .*\(49,\)"):
        models.load(name).build((49,), 10)


def test_shortcut_takes_every_second_pixel_and_adds_zeros():
    """Traced by hand: with its convolutions at zero, a network is its shortcuts."""
    model = resnet.build_small("small", (4, 6, 1), 2, num_blocks=1)
    for layer in convolutions(model)[1:]:
        layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
    x = np.random.default_rng(0).random((2, 4, 6, 1), np.float32)
    first, last = (keras.Model(model.input, layer.output) for layer in (
        next(layer for layer in model.layers if isinstance(layer, keras.layers.ReLU)),
        [layer for layer in model.layers if isinstance(layer, keras.layers.ReLU)][-1],
    ))
    expected = np.zeros((2, 1, 2, 64), np.float32)
    expected[..., :16] = np.asarray(first(x))[:, ::4, ::4]
    np.testing.assert_array_equal(last(x), expected)
    assert expected.any()


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


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_recurrent_model_encodes_notes_one_hot_itself(name):
    notes = np.random.default_rng(0).integers(0, 20, (3, 7))
    from_notes = models.load(name).build((7,), 20)
    from_vectors = models.load(name).build((7, 20), 20)
    from_vectors.set_weights(from_notes.get_weights())
    assert from_notes.inputs[0].dtype == "int32"
    np.testing.assert_array_equal(
        from_notes(notes), from_vectors(np.eye(20, dtype=np.float32)[notes])
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_recurrent_model_reads_a_melody_of_a_single_note(steps):
    assert models.load("gru").build((steps,), 20)(np.ones((3, steps), np.int32)).shape == (3, 20)


def test_images_are_read_row_by_row():
    layers = models.load("gru").build((12, 14, 3), 10).layers
    first = next(layer for layer in layers if isinstance(layer, keras.layers.GRU))
    assert first.input.shape == (None, 12, 42)


@pytest.mark.parametrize(
    "name, layer_type", [("gru", keras.layers.GRU), ("lstm", keras.layers.LSTM)]
)
def test_recurrent_layers_are_configured_as_cudnn_computes_them(name, layer_type):
    layers = [layer for layer in models.load(name).build((49,), 128).layers
              if isinstance(layer, layer_type)]
    for layer in layers:
        assert layer.activation is keras.activations.tanh
        assert layer.recurrent_activation is keras.activations.sigmoid
        assert layer.use_bias and not layer.unroll and layer.recurrent_dropout == 0
        assert getattr(layer, "reset_after", True) and layer.use_cudnn == "auto"
        assert layer.kernel_regularizer.l2 == pytest.approx(1e-6)
    assert [layer.units for layer in layers] == [256, 256]


@pytest.mark.parametrize("name, num_parameters", [
    # gates x 1024 x (128 + 1024 + 2 or 1), 3 more of (1024 + 1024 + 2 or 1), dense as above
    ("gru", 3 * 1024 * (1154 + 3 * 2050) + 1025 * 512 + 513 * 128),
    ("lstm", 4 * 1024 * (1153 + 3 * 2049) + 1025 * 512 + 513 * 128),
])
@pytest.mark.parametrize("shape", [(49,), (49, 128)])
def test_large_recurrent_model_is_reached_by_module_and_function(
    name, num_parameters, shape, monkeypatch
):
    # Its orthogonal matrices take seconds.
    monkeypatch.setattr(keras.initializers.Orthogonal, "__call__",
                        lambda self, shape, dtype=None: keras.ops.zeros(shape, dtype))
    source = models.load(f"towers.models.{name}:build_large")
    assert source[2:] == ((49, 128), 128, "adam")
    assert source.build(shape, 128).count_params() == num_parameters


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
