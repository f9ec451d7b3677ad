"""--ema: what is evaluated and what is saved, as in Keras' fit."""

import keras
import numpy as np
import pytest

import towers
from tests.loop_test import config, small_data
from towers.config import TrainConfig


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_averages_are_final_and_a_run_goes_on_from_the_variables_themselves():
    values = {"ema": 0.9, "learning_rate": 0.05, "epochs": 2, "num_gpus": 1}
    history = towers.train(config(run_dir="whole", **values))
    ends = [keras.saving.load_model(f"whole/{name}.keras") for name in ("best", "final")]
    x, y = small_data()[1]
    best, final = (model.evaluate(x, y, verbose=0)[0] for model in ends)
    assert best == pytest.approx(min(history["val_loss"]), rel=1e-5)  # the last epoch's
    assert final != pytest.approx(history["val_loss"][-1], rel=1e-3)

    towers.train(config(run_dir="parts", **{**values, "epochs": 1}))
    assert towers.train(TrainConfig(resume="parts", epochs=2)) == history
    again = keras.saving.load_model("parts/final.keras")
    for a, b in zip(again.weights, ends[1].weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
