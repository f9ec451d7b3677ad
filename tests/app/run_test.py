"""train(config): what it computes, leaves in the run directory, and tells callbacks."""

import csv
import math
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from towers.app import run as run_lib
from towers.app.config import TrainConfig
from towers.app.training.build import build
from towers.divide.facts import OWN
from towers.divide.rule import RULES
from towers.app import run_dir
from towers.resume import checkpoints

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")
NUM_CLASSES = 3


def small_model(input_shape, num_classes, *layers):
    """Its layers' names do not count the models that a process has made before."""
    return keras.Sequential(
        [
            keras.Input(input_shape),
            keras.layers.Dense(8, activation="relu", name="body"),
            *layers,
            keras.layers.Dense(num_classes, activation="softmax", name="head"),
        ]
    )


def normalized_model(input_shape, num_classes):
    """With BatchNormalization, whose statistics differ between towers."""
    return small_model(input_shape, num_classes, keras.layers.BatchNormalization(name="norm"))


def small_data():
    """Three separable classes: 50 examples to train on, 20 to test."""
    generator = np.random.default_rng(0)
    y = generator.integers(0, NUM_CLASSES, 70)
    x = (np.eye(NUM_CLASSES)[y] + 0.1 * generator.normal(size=(70, NUM_CLASSES))).astype("float32")
    return (x[:50], y[:50]), (x[50:], y[50:])


def config(**values):
    """4 steps an epoch: 50 = 3 x 16 + 2."""
    small = {
        "model": "tests.app.run_test:small_model",
        "dataset": "tests.app.run_test:small_data",
        "num_gpus": 2,
        "batch_size": 16,
        "epochs": 2,
    }
    return TrainConfig(**{**small, **values})


def measured(model, x, y):
    """[loss, accuracy] of examples."""
    p = np.asarray(model(x))
    return [-np.mean(np.log(p[range(len(y)), y])), np.mean(p.argmax(axis=1) == y)]


def rows(directory):
    with open(f"{directory}/results.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_run_learns_and_leaves_its_files_with_the_best_model_and_the_last():
    class Spoil(keras.callbacks.Callback):
        """From the fifth epoch on, every prediction is class 0."""

        def on_epoch_end(self, epoch, logs=None):
            if epoch >= 3:
                self.model.trainable_variables[-1].assign([100.0, 0.0, 0.0])

    history = towers.train(config(epochs=6, optimizer="adam", learning_rate=0.05), [Spoil()])
    directory = run_dir.RUNS / "tests.app.run_test_small_model-tests.app.run_test_small_data-001"
    assert sorted(path.name for path in directory.iterdir()) == [
        "best.keras",
        "checkpoints",
        "config.json",
        "final.keras",
        "ledger.csv",
        "log.txt",
        "results.csv",
        "results.png",
    ]
    assert [row["epoch"] for row in rows(directory)] == ["1", "2", "3", "4", "5", "6"]
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(
            [float(row[name]) for row in rows(directory)], history[name], rtol=1e-5
        )
    assert "Done: 6 epochs in" in (directory / "log.txt").read_text()
    best, final = (
        keras.saving.load_model(directory / f"{name}.keras") for name in ("best", "final")
    )
    (_, _), (x, y) = small_data()
    values = history["val_loss"], history["val_accuracy"]
    loss, accuracy = max(zip(*values, strict=True), key=lambda epoch: (epoch[1], -epoch[0]))
    assert accuracy > 0.9 > values[1][-1]
    assert measured(best, x, y) == pytest.approx([loss, accuracy])
    assert final.trainable_variables[-1].numpy()[0] == 100


def test_zero_epochs_evaluate_and_change_nothing():
    history = towers.train(config(epochs=0, run_dir="run"))
    assert set(history) == {"val_loss", "val_accuracy"}
    assert sorted(path.name for path in run_dir.Path("run").iterdir()) == [
        "checkpoints",
        "config.json",
        "log.txt",
    ]
    expected = measured(build(config()).step.model, *small_data()[1])
    assert [*history["val_loss"], *history["val_accuracy"]] == pytest.approx(expected, rel=1e-6)


def test_a_plan_trains_nothing_and_makes_no_directory(capsys):
    assert towers.train(config(plan=True)) == {}
    assert list(run_dir.Path(".").iterdir()) == []
    assert "Each step moves" in capsys.readouterr().out


def test_gradients_that_differ_are_an_error_before_the_run_begins_or_a_warning(capsys, monkeypatch):
    """A rule is broken: towers double a difference."""
    monkeypatch.setitem(
        RULES,
        "Sub",
        lambda look: look.each(
            [OWN, OWN], look.fact(0), emit=lambda context, op, given: [2 * (given[0] - given[1])]
        ),
    )
    x = small_data()[0][0]
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, y_pred: tf.square(y - y_pred))
    differing = {"model": model, "train": (x, x.sum(axis=1, keepdims=True) + 20)}
    given = {"num_gpus": 2, "num_towers": 2, "batch_size": 16, "max_steps": 1, "run_dir": "run"}
    words = "^`verify_gradients` has found .*MORE than float rounding"
    with pytest.raises(ValueError, match=words):
        towers.train(TrainConfig(**given, verify_gradients=True), **differing)
    assert list(run_dir.Path(".").iterdir()) == []
    towers.train(TrainConfig(**given, verify_gradients="warn"), **differing)
    assert "Warning   largest relative difference" in capsys.readouterr().out


@pytest.mark.matrix
def test_files_come_before_callbacks_and_the_checkpoint_after():
    """A callback can read what the epoch has left; a checkpoint holds what the callback did."""
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            files = sorted(path.name for path in run_dir.Path("run").iterdir())
            newest = checkpoints.find(run_dir.Path("run/checkpoints"))[0].name
            seen.append((len(rows("run")), "best.keras" in files, newest))
            self.model.optimizer.learning_rate.assign(0.125)

    towers.train(config(epochs=1, run_dir="run"), [Look()])
    assert seen == [(1, True, "epoch-0-step-0")]
    _, (_, arrays), _ = checkpoints.read_newest(run_dir.Path("run/checkpoints"))
    assert [float(v) for name, v in arrays.items() if "learning_rate" in name] == [0.125]


def test_ctrl_c_shows_where_the_run_stopped_and_how_its_script_resumes_it(capsys):
    """The dtype policy is the caller's again afterwards."""

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert self.model.layers[0].compute_dtype == "float16" and math.isfinite(logs["loss"])
            if batch == 2:
                raise KeyboardInterrupt

    train, test = small_data()
    given = config(dataset="mnist", run_dir="own", precision="mixed_float16")
    with pytest.raises(KeyboardInterrupt):
        towers.train(given, [Interrupt()], train=train, test=test)
    words = "saved at step 3. Resume: the same script, with towers.TrainConfig(resume='own', "
    words += "trust_run_dir=True)"
    assert words in capsys.readouterr().out
    assert keras.config.dtype_policy().name == "float32"


def data_that_move():
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    return small_data()


def test_a_run_stays_where_it_began_while_its_data_and_callbacks_move(tmp_path, capsys):
    class Moves(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            os.chdir(tmp_path / "elsewhere")

    moving, first = "tests.app.run_test:data_that_move", tmp_path / "mine.keras"
    small_model((NUM_CLASSES,), NUM_CLASSES).save(first)
    values = {"dataset": moving, "export": "served", "init_from": first.name}
    towers.train(config(epochs=1, **values), [Moves()])
    name = "runs/tests.app.run_test_small_model-tests.app.run_test_data_that_move-001"
    said = capsys.readouterr().out
    assert f"run: {name}\n" in said
    assert f"variables begin with the values in {first.name}" in said
    left = {path.name for path in (tmp_path / name).iterdir()}
    assert {"final.keras", "results.csv", "log.txt", "checkpoints", "config.json"} <= left
    assert (tmp_path / "served").is_dir() and os.listdir(tmp_path / "elsewhere") == []


@pytest.mark.parametrize(
    "values, message",
    [
        ({"device": "gpu"}, "device=gpu: TensorFlow sees no GPU"),
        ({"cpu_threads": 99}, r"cpu_threads \(99\): TensorFlow has already started with "),
        ({"optimizer": "adm"}, r"optimizer \('adm'\) must be one of adadelta, "),
    ],
)
@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU")
def test_values_that_do_not_fit_the_machine_are_errors_before_there_is_a_directory(values, message):
    with pytest.raises(ValueError, match=message):
        towers.train(config(**values))
    assert list(run_dir.Path(".").iterdir()) == []


def test_a_used_directory_is_an_error_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(run_lib, "build", lambda config: pytest.fail("built"))
    run_dir.create("run", "n", "{}")
    with pytest.raises(ValueError, match="continue it: resume=run"):
        towers.train(config(run_dir="run"))
