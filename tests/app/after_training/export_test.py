"""Exported models, read by TensorFlow alone, beside Keras' own outputs."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import towers
from tests.app.run_test import config
from towers.app.after_training.export import export_model
from towers.app.after_training.model_files import file_config
from towers.app.after_training.predicting import evaluate_file
from towers.app.config import TrainConfig
from towers.app.reporting.report import Report

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")


def served(path, inputs):
    """The outputs in the order of their names, for inputs by name or for one array."""
    model = tf.saved_model.load(path)  # a name: its variables live as long as it does
    outputs = model.serve(inputs)
    return [outputs[name] for name in sorted(outputs)] if isinstance(outputs, dict) else [outputs]


def examples(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def test_inputs_and_outputs_keep_their_names():
    left, right = keras.Input((4,), name="left"), keras.Input((5,), name="right")
    both = layers.Concatenate()([left, right])
    model = keras.Model(
        {"left": left, "right": right},
        {"wide": layers.Dense(3)(both), "narrow": layers.Dense(2)(both)},
    )
    inputs = {"right": examples(3, 5), "left": examples(3, 4)}
    export_model(model, "new/model")
    expected, found = model(inputs), served("new/model", inputs)
    for name, values in zip(("narrow", "wide"), found, strict=True):
        np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-6)


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
    np.testing.assert_allclose(served("served", x)[0], expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^export .new.: Keras cannot take this model: .* built"):
        export_model(Subclass(), "new")
    assert not Path("new").exists()


def test_an_export_that_cannot_be_made_is_an_error_before_there_is_a_run(tmp_path):
    def refused(path, message):
        with pytest.raises(ValueError, match=message):
            towers.train(config(run_dir="run", export=path))
        assert not Path("run").exists()

    (tmp_path / "mine").write_text("mine")
    refused("mine", r"^export \(mine\) exists already; name a new directory")
    refused(".", r"^export \(.\) exists already")
    refused("m.ONNX", r"^export \(m.ONNX\) is .* SavedModel.* Keras' `export` or `save`")
    refused("m.h5", r"^export \(m.h5\) is .* SavedModel")
    with pytest.raises(ValueError, match=r"^export \(mine/sm\) cannot be written: "):
        export_model(keras.Sequential([keras.Input((3,)), layers.Dense(2)]), "mine/sm")


def write_images(directory):
    """Two classes, dark and light, of images with the values 0 to 255."""
    for index in range(24):
        part, name = ("train", "val")[index % 3 == 2], ("dark", "light")[index % 2]
        path = directory / part / name / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 128, (8, 8, 3)) + 120 * (index % 2)
        path.write_bytes(tf.io.encode_png(pixels.astype(np.uint8)).numpy())


def test_a_run_exports_its_final_model_and_a_complete_one_or_its_file_does_later(tmp_path, capsys):
    """The averages of --ema are in all: it is not the last checkpoint that is exported.

    A line says that divided images are taken, and a file lists the names of the classes.
    """
    write_images(tmp_path / "images")
    towers.train(
        config(
            model="tests.loading:model",
            dataset="image_folder",
            data_dir="images",
            run_dir="run",
            epochs=1,
            ema=0.9,
            learning_rate=0.1,
            export="first",
        )
    )
    assert "\nExport    first holds the model as a SavedModel\n" in capsys.readouterr().out
    towers.train(TrainConfig(resume="run", trust_run_dir=True, export="second"))
    towers.train(TrainConfig(resume="run", trust_run_dir=True))  # nothing is exported anew
    file = Path("run/final.keras")
    evaluate_file(file_config(file, {"export": "third", "trust_run_dir": True}), file, Report())
    assert capsys.readouterr().out.count("it takes images divided by 255") == 2
    x = np.random.default_rng(0).random((3, 8, 8, 3), np.float32)
    expected = keras.saving.load_model(file)(x)
    for name in ("first", "second", "third"):
        assert json.loads(Path(name, "classes.json").read_text()) == ["dark", "light"]
        for n in (3, 1):
            (found,) = served(name, x[:n])
            np.testing.assert_allclose(found, expected[:n], rtol=1e-4, atol=1e-6, err_msg=name)
