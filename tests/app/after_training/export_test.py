"""Exported models, each read by its own runtime, beside Keras' own outputs."""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import onnxruntime
import pytest
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter
from keras import layers

import towers
from tests.app.run_test import config, small_data
from towers.app.after_training.export import export_model
from towers.app.after_training.model_files import file_config
from towers.app.after_training.predicting import evaluate_file
from towers.app.config import TrainConfig
from towers.app.reporting.report import Report

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def by_tensorflow(path, inputs):
    """The outputs in the order of their names, for inputs by name or for one array."""
    served = tf.saved_model.load(path)  # a name: its variables live as long as it does
    outputs = served.serve(inputs)
    return [outputs[name] for name in sorted(outputs)] if isinstance(outputs, dict) else [outputs]


def by_onnx(path, inputs):
    session = onnxruntime.InferenceSession(path)
    if not isinstance(inputs, dict):
        inputs = {session.get_inputs()[0].name: inputs}
    return session.run(None, inputs)


def by_litert(path, inputs):
    interpreter = Interpreter(model_path=path, num_threads=1)
    runner = interpreter.get_signature_runner("serving_default")
    if not isinstance(inputs, dict):
        inputs = {next(iter(runner.get_input_details())): inputs}
    outputs = runner(**inputs)
    return [outputs[name] for name in sorted(outputs)]


READERS = {"": by_tensorflow, ".onnx": by_onnx, ".tflite": by_litert}
all_three = pytest.mark.parametrize("suffix", READERS)
files = pytest.mark.parametrize("suffix", [".onnx", ".tflite"])


def examples(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def test_a_run_exports_its_final_model_and_a_complete_one_does_later(capsys):
    """The averages of --ema are in all: it is not the last checkpoint that is exported."""
    towers.train(config(run_dir="run", epochs=1, ema=0.9, learning_rate=0.1, export="first"))
    assert "\nExport    first holds the model as a SavedModel\n" in capsys.readouterr().out
    for name in ("second.onnx", "second.TFLITE"):
        towers.train(TrainConfig(resume="run", export=name))
    towers.train(TrainConfig(resume="run"))  # nothing is exported anew
    x = small_data()[1][0]
    expected = keras.saving.load_model("run/final.keras").predict(x, verbose=0)
    for name in ("first", "second.onnx", "second.TFLITE"):
        for n in (5, 1):
            (found,) = READERS[Path(name).suffix.lower()](name, x[:n])
            np.testing.assert_allclose(found, expected[:n], rtol=1e-4, atol=1e-6, err_msg=name)


@all_three
def test_inputs_and_outputs_keep_their_names(suffix):
    left, right = keras.Input((4,), name="left"), keras.Input((5,), name="right")
    both = layers.Concatenate()([left, right])
    model = keras.Model({"left": left, "right": right},
                        {"wide": layers.Dense(3)(both), "narrow": layers.Dense(2)(both)})
    inputs = {"right": examples(3, 5), "left": examples(3, 4)}
    export_model(model, f"new/model{suffix}")
    expected, found = model(inputs), READERS[suffix](f"new/model{suffix}", inputs)
    for name, values in zip(("narrow", "wide"), found, strict=True):
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.telling(".onnx")
@files
def test_a_recurrent_model_of_mixed_precision_computes_in_float32(suffix):
    """LiteRT takes its loop for one example at a time; cuDNN, which has no such file, is left."""
    model = keras.Sequential([
        keras.Input((7, 3)), layers.LSTM(5, dtype="mixed_bfloat16"),
        layers.Dense(2, dtype="mixed_bfloat16"),
    ])
    recurrent = model.layers[0]
    recurrent.use_cudnn = True  # as on a GPU: without one it would be an error
    line = export_model(model, f"model{suffix}")[0]
    assert (recurrent.use_cudnn, recurrent.dtype_policy.name) == (True, "mixed_bfloat16")
    exact = keras.Sequential([keras.Input((7, 3)), layers.LSTM(5), layers.Dense(2)])
    exact.set_weights(model.get_weights())
    n = 1 if suffix == ".tflite" else 3
    assert line.endswith(", for one example at a time") == (n == 1)
    x = examples(n, 7, 3)
    (found,) = READERS[suffix](f"model{suffix}", x)
    np.testing.assert_allclose(found, exact(x), rtol=1e-5, atol=1e-6)


@keras.saving.register_keras_serializable("export_test")
class Subclass(keras.Model):
    """Keras' `export` refuses it as it comes from its file: it has not been called."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_a_subclass_is_exported_from_its_file():
    model, x = Subclass(), np.ones((3, 4), np.float32)
    expected = model(x)
    model.save("model.keras")
    export_model(Path("model.keras"), "served")
    np.testing.assert_allclose(by_tensorflow("served", x)[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^export .new.: Keras cannot take this model: .* built"):
        export_model(Subclass(), "new")
    assert not Path("new").exists()


def unusual_model(input_shape, num_classes):
    """No runtime beside TensorFlow has the inverse of the error function."""
    x = inputs = keras.Input(input_shape)
    x = keras.ops.erfinv(layers.Dense(8, activation="sigmoid")(x) / 2)
    return keras.Model(inputs, layers.Dense(num_classes, activation="softmax")(x))


@pytest.mark.telling(".onnx")
@files
def test_a_model_that_the_runtime_cannot_take_is_one_line_and_the_run_is_kept(suffix, tmp_path):
    values = {"model": f"{__name__}:unusual_model", "run_dir": "run"}
    message = r"^export .*/new/model.*: .* not among its operations: Erfinv. Export a SavedModel"
    with pytest.raises(ValueError, match=message):
        towers.train(config(**values, epochs=1, export=f"new/model{suffix}"))
    assert list((tmp_path / "new").iterdir()) == []
    before = Path("run/final.keras").read_bytes()
    towers.train(TrainConfig(resume="run", export="served"))
    assert Path("run/final.keras").read_bytes() == before and Path("served").is_dir()


def test_what_prevents_an_export_is_said_before_there_is_a_run(tmp_path, monkeypatch):
    def refused(path, message):
        with pytest.raises(ValueError, match=message):
            towers.train(config(run_dir="run", export=path))
        assert not Path("run").exists()

    (tmp_path / "mine.onnx").write_text("mine")
    refused("mine.onnx", r"^export \(mine.onnx\) exists already; name a new file")
    refused(".", r"^export \(.\) exists already")
    for name in ("onnx", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)  # as Python marks what cannot be imported
    refused("m.onnx", r"^export \(m.onnx\) needs onnx, onnxruntime. .* 'tf-towers\[onnx\]'$")
    monkeypatch.setattr(keras, "__version__", "3.14.1")
    refused("m.tflite", r"^export \(m.tflite\) needs Keras 3.15, not 3.14.1. .*\[litert\]'$")
    with pytest.raises(ValueError, match=r"^export \(mine.onnx/sm\) cannot be written: "):
        export_model(keras.Sequential([keras.Input((3,)), layers.Dense(2)]), "mine.onnx/sm")


def write_images(directory):
    """Two classes, dark and light, of images with the values 0 to 255."""
    for index in range(24):
        part, name = ("train", "val")[index % 3 == 2], ("dark", "light")[index % 2]
        path = directory / part / name / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 128, (8, 8, 3)) + 120 * (index % 2)
        path.write_bytes(tf.io.encode_png(pixels.astype(np.uint8)).numpy())


def test_an_export_says_that_it_takes_divided_images(tmp_path, capsys):
    """At a run's end, of a complete run, and of a file that is evaluated; with class names."""
    write_images(tmp_path / "images")
    towers.train(config(
        model="tests.loading:model", dataset="image_folder", data_dir="images", run_dir="run",
        epochs=1, export="plain",
    ))
    towers.train(TrainConfig(resume="run", export="again"))
    file = Path("run/final.keras")
    evaluate_file(file_config(file, {"export": "model.tflite"}), file, Report())
    assert capsys.readouterr().out.count("it takes images divided by 255") == 3
    for name in ("plain/classes.json", "again/classes.json", "model.classes.json"):
        assert json.loads(Path(name).read_text()) == ["dark", "light"]
    x = np.random.default_rng(0).random((3, 8, 8, 3), np.float32)
    expected = keras.saving.load_model(file)(x)
    for name in ("plain", "again"):
        np.testing.assert_allclose(by_tensorflow(name, x)[0], expected, rtol=1e-5, atol=1e-6)
