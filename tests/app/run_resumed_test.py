"""TrainConfig(resume=...): limits that a resume may change, and errors.

interrupted_test compares the bits of resumed runs, and continued_test those of the command.
"""

import csv
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.app import run_test
from tests.app.run_test import config
from towers.app import run_dir
from towers.resume import checkpoints, directories
from towers.app.config import TrainConfig

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")
RUN = run_dir.Path("run")
STILL = {"learning_rate": 1e-30, "optimizer": "sgd"}  # no value changes: epoch 1 stays best


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A run without interruption: its directory and its history."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, towers.train(config(run_dir=str(directory)))


@pytest.fixture
def whole(complete):
    """The history of a run without interruption."""
    return complete[1]


class Fail(keras.callbacks.Callback):
    """Fails after 6 of all the run's steps."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 6:
            raise LookupError("mine")


def script(**values):
    """What a script gives `towers.train` that names its data by a relative path."""
    return config(run_dir="run", resume="auto", dataset="npz", data_dir="data.npz", **values)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The directory of a script whose callback has failed; `data.npz` and `run` are there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("stopped"))
        (x, y), (x_test, y_test) = run_test.small_data()
        np.savez("data.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)
        with pytest.raises(LookupError, match="mine"):  # the callback's exception, unchanged
            towers.train(script(), [Fail()])
        return RUN.absolute().parent


@pytest.fixture
def copied(stopped):
    """A copy of it is the working directory."""
    shutil.copytree(stopped, ".", dirs_exist_ok=True)


def files():
    return {
        str(p): p.read_bytes() for p in RUN.rglob("*") if p.is_file() and p.name != directories.LOCK
    }


def resume(**values):
    """The history of the run in RUN, which goes on."""
    return towers.train(TrainConfig(resume="run", trust_run_dir=True, **values))


def refused(message, **values):
    before = files()
    with pytest.raises(ValueError, match=message):
        resume(**values)
    assert files() == before


def test_a_script_that_a_callback_has_ended_resumes_when_it_is_started_again(whole, copied):
    with pytest.raises(ValueError, match="resume=auto continues the run .*Set `run_dir`"):
        towers.train(config(resume="auto"))
    log = (RUN / "log.txt").read_text()
    assert "saved at step 6. Resume: python train.py --resume=run --trust_run_dir\n" in log
    assert json.loads((RUN / "config.json").read_text())["resume"] is None
    assert towers.train(script()) == whole
    with pytest.raises(ValueError, match="cannot change optimizer"):
        towers.train(script(optimizer="sgd"))


def test_a_run_of_an_older_version_resumes_with_data_that_have_moved(
    whole, copied, tmp_path, monkeypatch
):
    """Its config.json and checkpoints lack some fields.

    It goes on from another working directory; other data are an error.
    """
    settings = json.loads((RUN / "config.json").read_text())
    path, checkpoint, _ = checkpoints.read_newest(RUN / "checkpoints")
    for field in ("monitor_mode", "callbacks", "deterministic"):
        del settings[field], checkpoint.state["config"][field]
    (RUN / "config.json").write_text(json.dumps(settings))
    shutil.rmtree(RUN / "checkpoints")
    (RUN / "checkpoints").mkdir()
    checkpoints.write(path, checkpoint)
    with np.load("data.npz") as saved:
        np.savez("other.npz", **{**saved, "y_train": saved["y_train"][::-1]})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    with pytest.raises(ValueError, match=r"data_dir \(data.npz\).* does not exist.* `resume`"):
        towers.train(TrainConfig(resume="../run", trust_run_dir=True))
    with pytest.raises(ValueError, match="the train data are not those"):
        towers.train(TrainConfig(resume="../run", trust_run_dir=True, data_dir="../other.npz"))
    (tmp_path / "data.npz").rename(tmp_path / "elsewhere/moved.npz")
    moved = TrainConfig(resume="../run", trust_run_dir=True, data_dir="moved.npz")
    assert towers.train(moved) == whole
    assert json.loads((tmp_path / "run/config.json").read_text())["data_dir"] == "moved.npz"


def test_a_complete_run_says_so_wherever_it_has_been_moved(complete, capsys):
    shutil.copytree(complete[0], RUN)
    before = files()
    assert resume() == complete[1]
    assert "Already complete: 2 epochs, best val_accuracy" in capsys.readouterr().out
    after = files()
    assert after.pop("run/log.txt").startswith(before.pop("run/log.txt"))
    assert after == before


def test_a_run_that_has_ended_resumes_with_other_limits(whole):
    """`max_steps` is larger and `epochs` smaller than before. What a killed process left goes."""
    towers.train(config(run_dir="run", epochs=4, max_steps=3))
    (RUN / ".best.5.tmp.keras").touch()
    limits = {"epochs": 2, "max_steps": 8}
    assert resume(**limits) == whole
    with open("run/results.csv", encoding="utf-8") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2"]
    saved = json.loads((RUN / "config.json").read_text())
    assert saved.items() >= {**limits, "resume": None}.items()
    assert (RUN / "final.keras").exists() and not (RUN / ".best.5.tmp.keras").exists()
    refused("epochs.* is reached already: the run has done ", epochs=1)


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"seed": 1, "num_towers": 3},
            r"num_towers \(3, the run has 2\), seed \(1, the .*: it would be",
        ),
        ({"epochs": 1}, r"epochs \(1\) is reached already: the run has done 6 steps, and is left"),
        ({"epochs": 1, "max_steps": 9, "seed": 2}, r"change seed .* other `epochs`, `max_steps`, "),
        ({"early_stopping": 3}, r" early_stopping \(3, the run has None\)"),
    ],
)
def test_values_of_another_run_are_an_error_that_lists_the_differences(values, message, copied):
    """continued_test tries every field."""
    refused(message, **values)


def test_an_edited_configuration_is_an_error(copied):
    path = RUN / run_dir.CONFIG
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 5'))
    refused(r"belongs to another run: seed \(0 then, 5 now\). Restore config.json")


def test_a_run_without_its_checkpoints_is_an_error(copied):
    shutil.rmtree(RUN / "checkpoints")
    refused("holds no checkpoint, and .*/run holds results")


@pytest.mark.matrix
def test_a_run_killed_before_its_first_checkpoint_begins_at_step_0(capsys):
    whole = towers.train(config(run_dir="whole"))
    run_dir.create("run", "n", (run_dir.Path("whole") / "config.json").read_text())
    assert resume() == whole
    assert "no checkpoint yet: from step 0" in capsys.readouterr().out


def test_early_stopping_ends_the_run_after_epochs_without_a_better_one():
    """Each epoch's end is saved, and the best epoch's checkpoint is kept."""
    still = {**STILL, "epochs": 9, "early_stopping": 2, "checkpoint_every": 3}
    assert len(towers.train(config(run_dir="run", **still))["loss"]) == 3
    state = checkpoints.read_newest(RUN / "checkpoints")[1].state
    assert state["position"]["best_step"] == 4
    names = [path.name for path in checkpoints.find(RUN / "checkpoints")]
    assert names == ["epoch-3-step-12", "epoch-2-step-9", "epoch-2-step-8", "epoch-1-step-4"]
    before = files()
    assert len(resume(epochs=20)["loss"]) == 3
    assert {**files(), "run/log.txt": None} == {**before, "run/log.txt": None}
    assert len(resume(early_stopping=4)["loss"]) == 5
    refused(r"cannot change early_stopping \(3, the run has 4\)", early_stopping=3)


def failing_model(input_shape, num_classes):
    """An operation in its graph fails on one of the examples."""
    largest = run_test.small_data()[0][0].max()

    class Check(keras.layers.Layer):
        def call(self, x):
            tf.debugging.Assert(tf.reduce_all(x < largest), ["too large"])
            return x

    return keras.Sequential(
        [keras.Input(input_shape), Check(), keras.layers.Dense(num_classes, activation="softmax")]
    )


def test_an_error_inside_a_step_leaves_the_checkpoint_before_it(capsys):
    failing = {"model": "tests.app.run_resumed_test:failing_model", "num_gpus": 1, "num_towers": 2}
    with pytest.raises(ValueError, match="^step [0-9]: .*too large.*labels and weights of this b"):
        towers.train(config(run_dir="run", checkpoint_every=1, **failing))
    (path, *_) = checkpoints.find(RUN / "checkpoints")
    said = f"the last checkpoint is from step {checkpoints.step_of(path)}. Resume: "
    assert said in capsys.readouterr().out
    assert checkpoints.is_good(path)
