"""A SavedModel that serves without towers, and where it may be written."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.app.loop_test import config, small_data
from towers.app.after_training.export import export_model
from towers.app.after_training.model_files import file_config
from towers.app.after_training.predicting import evaluate_file
from towers.app.config import TrainConfig
from towers.app.reporting.report import Report

pytestmark = pytest.mark.light  # not about updates or curves


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_run_exports_its_final_model_and_a_complete_one_does_later(capsys):
    """The averages of --ema are in both: it is not the last checkpoint that is exported."""
    towers.train(config(run_dir="run", epochs=1, ema=0.9, learning_rate=0.1, export="first"))
    assert "\nExport    first holds the model as a SavedModel\n" in capsys.readouterr().out
    assert TrainConfig.from_json(open("run/config.json", encoding="utf-8").read()).export == "first"
    towers.train(TrainConfig(resume="run", export="second"))
    x = small_data()[1][0]
    expected = keras.saving.load_model("run/final.keras").predict(x, verbose=0)
    for directory in ("first", "second"):
        served = tf.saved_model.load(directory)
        np.testing.assert_allclose(served.serve(x).numpy(), expected, rtol=1e-6)
        np.testing.assert_allclose(served.serve(x[:3]).numpy(), expected[:3], rtol=1e-6)
    towers.train(TrainConfig(resume="run"))  # nothing is exported anew


@keras.saving.register_keras_serializable("export_test")
class Subclass(keras.Model):
    """Keras' `export` refuses it as it comes from its file: it has not been called."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_a_model_of_a_subclass_is_exported_from_its_file():
    model, x = Subclass(), np.ones((3, 4), np.float32)
    expected = model(x)
    model.save("model.keras")
    export_model(Path("model.keras"), "served")
    served = tf.saved_model.load("served")
    np.testing.assert_allclose(served.serve(x), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"^export \(new\): Keras cannot export it: .* built"):
        export_model(Subclass(), "new")
    assert not Path("new").exists()


def test_a_directory_that_exists_or_cannot_be_made_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"^export \(.\) exists already"):
        export_model(model, ".")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^export \(file/sm\) cannot be written: "):
        export_model(model, "file/sm")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def write_images(directory):
    """Two classes, dark and light, of images with the values 0 to 255."""
    for index in range(24):
        part, name = ("train", "val")[index % 3 == 2], ("dark", "light")[index % 2]
        path = directory / part / name / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(index).integers(0, 128, (8, 8, 3)) + 120 * (index % 2)
        path.write_bytes(tf.io.encode_png(pixels.astype(np.uint8)).numpy())


def test_an_export_says_what_it_takes_and_may_divide_pixels_itself(tmp_path, capsys):
    """At a run's end, of a complete run, and of a file that is evaluated; with class names."""
    write_images(tmp_path / "images")
    run = config(
        model="mlp", dataset="image_folder", data_dir="images", run_dir="run", epochs=1,
        export="plain",
    )
    towers.train(run)
    assert (
        "plain holds the model as a SavedModel\n"
        "          it takes images divided by 255; with export_pixels, 0 to 255\n"
        "          class names: plain/classes.json\n"
    ) in capsys.readouterr().out
    towers.train(TrainConfig(resume="run", export="pixels", export_pixels=True))
    file = Path("run/final.keras")
    evaluated = file_config(file, {"export": "model.tflite", "export_pixels": True})
    evaluate_file(evaluated, file, Report())
    said = capsys.readouterr().out
    assert said.count("          it takes uint8 images, 0 to 255, and divides them by 255\n") == 2
    assert "          class names: model.classes.json\n" in said
    for name in ("plain/classes.json", "pixels/classes.json", "model.classes.json"):
        assert json.loads(Path(name).read_text()) == ["dark", "light"]
    x = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    expected = keras.saving.load_model(file)(x / np.float32(255))
    for name, given in (("plain", x / np.float32(255)), ("pixels", x)):
        served = tf.saved_model.load(name)
        np.testing.assert_allclose(served.serve(given), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("values", "message"), [
    ({"export": "served"}, "towers divided no images by 255 for this model. Leave it out"),
    ({}, "export_pixels=True needs `export`"),
])
def test_an_export_divides_no_pixels_where_the_run_did_not(values, message):
    with pytest.raises(ValueError, match=message):
        towers.train(config(run_dir="run", export_pixels=True, **values))
    assert not Path("run").exists()


def test_each_image_among_several_inputs_is_divided():
    parts = {"a": keras.Input((2, 2, 1), name="a"), "b": keras.Input((3,), name="b")}
    x = keras.layers.Concatenate()([keras.layers.Flatten()(parts["a"]), parts["b"]])
    model = keras.Model(parts, keras.layers.Dense(2)(x))
    export_model(model, "served", divided=[True, False], takes_pixels=True)
    pixels, numbers = np.full((5, 2, 2, 1), 51, np.uint8), np.ones((5, 3), np.float32)
    served = tf.saved_model.load("served")
    expected = model({"a": np.full(pixels.shape, 0.2, np.float32), "b": numbers})
    np.testing.assert_allclose(served.serve({"a": pixels, "b": numbers}), expected, rtol=1e-6)
