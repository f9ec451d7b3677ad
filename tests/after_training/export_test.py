"""A SavedModel that serves without towers, and where it may be written."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.loop_test import config, small_data
from towers.after_training.export import export_model
from towers.config import TrainConfig

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
