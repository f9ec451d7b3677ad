"""--runs: one line for each run, whatever state it is in, and without TensorFlow."""

import shutil
from pathlib import Path

import keras
import pytest

import towers
from tests.app.run_test import config
from towers.app.reporting.runs import list_runs
from towers.resume import directories

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise KeyboardInterrupt


def cells(directory="."):
    """The cells of each run, without the time, by the run's name."""
    header, *lines = list_runs(Path(directory))
    assert header.split()[:4] == ["run", "model", "epochs", "steps"]
    return {line.split()[0]: line.split()[2:-2] for line in lines}


def test_each_run_has_its_epochs_its_best_value_and_its_state():
    history = towers.train(config(run_dir="ended", monitor="val_loss", optimizer="sgd"))
    with pytest.raises(KeyboardInterrupt):
        towers.train(config(run_dir="ended_early"), [Stop()])
    shutil.copytree("ended", "at_work")
    best = f"{min(history['val_loss']):.4g}"
    with directories.locked(Path("at_work")):
        assert cells() == {
            "ended": ["2/2", "8", "val_loss", best, "complete"],
            "ended_early": ["0/2", "3", "stopped"],
            "at_work": ["2/2", "8", "val_loss", best, "running"],
        }
    towers.train(config(run_dir="ended", resume="auto", epochs=3, trust_run_dir=True, max_steps=9))
    assert cells()["ended"][:2] == ["2/3", "9"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"epochs": 0.5}', "[" * 10**5, "\0\x1b[2J"])
def test_files_of_a_stranger_are_one_line(text):
    Path("a\x1b[2J").mkdir()
    Path("a\x1b[2J", "config.json").write_text(text)
    header, line = list_runs(Path())
    assert line.startswith(r"a\x1b[2J ") and " unreadable " in line
    Path("b/checkpoints/epoch-1-step-4").mkdir(parents=True)
    Path("b/config.json").write_text(config().to_json())
    Path("b/checkpoints/epoch-1-step-4/manifest.json").write_text(text)
    assert len(list_runs(Path())) == 3
