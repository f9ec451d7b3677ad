"""ONNX and LiteRT files, each read by its own runtime, beside Keras' own outputs."""

import sys
from pathlib import Path

import keras
import numpy as np
import onnxruntime
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras import layers

import towers
from tests.app.loop_test import config
from towers.app.after_training.export import export_model
from towers.app.config import TrainConfig
from towers.app.datasets import mnist

pytestmark = pytest.mark.light  # not about updates or curves


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def by_onnx(path, inputs):
    """The outputs in the file's order, for inputs by name or for one array."""
    session = onnxruntime.InferenceSession(path)
    if not isinstance(inputs, dict):
        inputs = {session.get_inputs()[0].name: inputs}
    return session.run(None, inputs)


def by_litert(path, inputs):
    """The same as `by_onnx`."""
    interpreter = Interpreter(model_path=path, num_threads=1)
    runner = interpreter.get_signature_runner("serving_default")
    if not isinstance(inputs, dict):
        inputs = {next(iter(runner.get_input_details())): inputs}
    outputs = runner(**inputs)
    return [outputs[name] for name in sorted(outputs)]


READERS = {"onnx": by_onnx, "tflite": by_litert}
both = pytest.mark.parametrize("suffix", READERS)


def examples(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def test_both_runtimes_say_what_keras_says_of_a_trained_convnet(capsys):
    """Of a run's end, and of the same run later, for any number of digits."""
    data = mnist.load()
    (x, y), (x_test, y_test) = data.train, data.test
    digits = {"train": (x[:64], y[:64]), "test": (x_test[:16], y_test[:16])}
    run = TrainConfig(run_dir="run", num_gpus=2, batch_size=32, epochs=1, export="first.onnx")
    towers.train(run, model=towers.models.load("cnn").build((28, 28, 1), 10), **digits)
    assert "\nExport    first.onnx holds the model as ONNX\n" in capsys.readouterr().out
    trained = keras.saving.load_model("run/final.keras")
    shown = x_test[:5]
    for name in ("second.onnx", "second.TFLITE"):
        export_model(Path("run/final.keras"), name)
    for n in (5, 1, 2):
        expected = trained.predict(shown[:n], verbose=0)
        for path, read in (("first.onnx", by_onnx), ("second.onnx", by_onnx),
                           ("second.TFLITE", by_litert)):
            (found,) = read(path, shown[:n])
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6, err_msg=path)


@both
def test_inputs_and_outputs_keep_their_names(suffix):
    left, right = keras.Input((4,), name="left"), keras.Input((5,), name="right")
    both = layers.Concatenate()([left, right])
    model = keras.Model({"left": left, "right": right},
                        {"wide": layers.Dense(3)(both), "narrow": layers.Dense(2)(both)})
    inputs = {"right": examples(3, 5), "left": examples(3, 4)}
    export_model(model, f"new/model.{suffix}")
    expected, found = model(inputs), READERS[suffix](f"new/model.{suffix}", inputs)
    for name, values in zip(("narrow", "wide"), found, strict=True):  # in alphabetical order
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6)


@both
def test_a_recurrent_model_of_mixed_precision_computes_in_float32(suffix):
    """LiteRT takes its loop for one example at a time; cuDNN, which has no such file, is left."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = keras.Sequential([
            keras.Input((7, 3)), layers.Conv1D(4, 3), layers.Bidirectional(layers.LSTM(5)),
            layers.Dense(2),
        ])
    finally:
        keras.config.set_dtype_policy("float32")
    recurrent = model.layers[1].forward_layer
    recurrent.use_cudnn = True  # as on a GPU: without one it would be an error
    x = examples(3, 7, 3)
    line = export_model(model, f"model.{suffix}")[0].plain
    assert (recurrent.use_cudnn, recurrent.dtype_policy.name) == (True, "mixed_bfloat16")
    recurrent.use_cudnn = False
    exact = keras.Sequential.from_config(_in_float32(model.get_config()))
    exact.set_weights(model.get_weights())
    n = 1 if suffix == "tflite" else 3
    assert line.endswith(", for one example at a time") == (n == 1)
    (found,) = READERS[suffix](f"model.{suffix}", x[:n])
    np.testing.assert_allclose(found, exact(x[:n]), rtol=1e-5, atol=1e-6)
    rounded = keras.ops.convert_to_numpy(keras.ops.cast(model(x[:n]), "float32"))
    assert np.abs(found - rounded).max() > 1e-4


def _in_float32(config):
    """A layer's configuration with another policy, however deep."""
    if isinstance(config, dict):
        return {name: _in_float32(value) for name, value in config.items()}
    if isinstance(config, list | tuple):
        return type(config)(map(_in_float32, config))
    return "float32" if config == "mixed_bfloat16" else config


def unusual_model(input_shape, num_classes):
    """No runtime beside TensorFlow has the inverse of the error function."""
    x = inputs = keras.Input(input_shape)
    x = keras.ops.erfinv(layers.Dense(8, activation="sigmoid")(x) / 2)
    return keras.Model(inputs, layers.Dense(num_classes, activation="softmax")(x))


@both
def test_a_model_that_the_runtime_cannot_take_is_one_line_and_the_run_is_kept(suffix, tmp_path):
    values = {"model": "tests.app.after_training.runtimes_test:unusual_model", "run_dir": "run"}
    with pytest.raises(ValueError) as refused:
        towers.train(config(**values, epochs=1, export=f"new/model.{suffix}"))
    name = {"onnx": "ONNX", "tflite": "LiteRT"}[suffix]
    assert str(refused.value) == (
        f"export ({tmp_path}/new/model.{suffix}): {name} cannot take this model: not "
        f"among its operations: Erfinv. "
        f"Export a SavedModel, a path without .{suffix}; what was trained is as it was."
    )
    assert list((tmp_path / "new").iterdir()) == []
    before = Path("run/final.keras").read_bytes()
    towers.train(TrainConfig(resume="run", export="served"))
    assert Path("run/final.keras").read_bytes() == before and Path("served").is_dir()


@pytest.mark.parametrize("missing", [["tf2onnx"], ["onnx", "onnxruntime"]])
def test_a_missing_package_is_said_before_there_is_a_run(missing, tmp_path, monkeypatch):
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)  # as Python marks what cannot be imported
    with pytest.raises(ValueError) as refused:
        towers.train(config(run_dir="run", export="model.onnx"))
    assert str(refused.value) == (
        f"export (model.onnx) needs {', '.join(missing)}. Install with: "
        "pip install 'tf-towers[onnx]'"
    )
    assert list(tmp_path.iterdir()) == []


def test_an_older_keras_is_said_before_there_is_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.14.1")
    with pytest.raises(ValueError, match=r"^export \(model.tflite\) needs Keras 3.15 or newer; "
                       r"this is 3.14.1. Install it with: pip install 'tf-towers\[litert\]'$"):
        towers.train(config(run_dir="run", export="model.tflite"))
    assert list(tmp_path.iterdir()) == []


@both
def test_a_file_that_exists_is_left(suffix):
    Path(f"model.{suffix}").write_text("mine")
    with pytest.raises(ValueError, match=rf"model.{suffix}\) exists already; name a new file"):
        towers.train(config(run_dir="run", export=f"model.{suffix}"))
    assert Path(f"model.{suffix}").read_text() == "mine"
