"""The confusion matrix counts each test example once, and names what is confused most."""

import io
from pathlib import Path

import keras
import numpy as np
import pytest

import towers
from tests.app.run_test import NUM_CLASSES, config, small_data
from towers.app.after_training import confusion
from towers.app.after_training.predicting import evaluate_file
from towers.app.config import TrainConfig
from towers.app.reporting.report import Report

pytestmark = pytest.mark.usefixtures("in_an_empty_directory", "without_charts")
X, Y = small_data()[1]


def expected(model):
    """By another way than the matrix: one pass in Python over Keras' predictions."""
    counts = np.zeros((NUM_CLASSES, NUM_CLASSES), int)
    for label, row in zip(Y, model.predict(X, verbose=0), strict=True):
        counts[label, row.argmax()] += 1
    return counts


def mistakes(counts):
    """The three largest counts of mistakes, in descending order."""
    return sorted((n for (i, j), n in np.ndenumerate(counts) if i != j and n), reverse=True)[:3]


def said_mistakes(text):
    (line,) = (line for line in text.splitlines() if line.startswith("Confused "))
    return [int(part.rpartition(" ")[2]) for part in line.split(",")]


def test_a_run_and_the_evaluation_of_its_file_count_what_keras_predicts(capsys, monkeypatch):
    drawn = []
    show = confusion.show
    monkeypatch.setattr(
        confusion, "show", lambda counts, *rest: (drawn.append(counts), show(counts, *rest))
    )
    values = {"num_towers": 3, "batch_size": 7, "max_steps": 3, "optimizer": "sgd"}
    towers.train(config(run_dir="run", confusion_matrix=True, **values))
    counts = expected(keras.saving.load_model("run/final.keras"))
    assert Path("run/confusion.png").read_bytes()[:4] == b"\x89PNG"
    assert said_mistakes(capsys.readouterr().out) == mistakes(counts) != []
    data = TrainConfig(dataset="tests.app.run_test:small_data", num_gpus=2, batch_size=7)
    file, out = Path("run/final.keras"), Report(io.StringIO())
    evaluate_file(data, file, out, "matrix.png")
    with pytest.raises(ValueError, match=r"^out \(matrix.png\) exists already"):
        evaluate_file(data, file, out, "matrix.png")
    assert len(drawn) == 2
    for found in drawn:
        np.testing.assert_array_equal(found, counts)


@pytest.mark.parametrize(
    "y, outputs, counts",
    [
        ([0, 1, 1], [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], [[1, 0], [1, 1]]),
        ([[0], [1], [1]], [[0.1], [0.8], [0.3]], [[1, 0], [1, 1]]),
        ([[1, 0], [0, 1], [0, 1]], [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]], [[1, 0], [1, 1]]),
    ],
)
def test_labels_may_be_indices_or_one_hot_and_two_classes_one_probability(y, outputs, counts):
    np.testing.assert_array_equal(confusion.count(np.array(y), np.array(outputs)), counts)


@pytest.mark.parametrize(
    "y, outputs",
    [
        (np.array([0.3]), np.ones((1, 1))),
        (np.array([2]), np.ones((1, 2))),
        (np.zeros((2, 5)), np.ones((2, 5, 3))),
        (np.zeros(1), {"a": np.ones((1, 2))}),
    ],
)
def test_what_is_no_classifier_is_an_error_that_shows_the_shapes(y, outputs):
    with pytest.raises(ValueError, match="needs one class for each example .*; here y is "):
        confusion.count(y, outputs)


def test_a_run_without_classes_is_complete_with_a_warning(capsys):
    model = keras.Sequential([keras.Input((NUM_CLASSES,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    y = X.sum(axis=1)
    task = {"run_dir": "run", "epochs": 1, "num_gpus": 2, "confusion_matrix": True}
    towers.train(TrainConfig(**task), model=model, train=(X, y), test=(X, y))
    shown = capsys.readouterr().out
    assert "Warning   confusion.png cannot be drawn (ValueError: a confusion matrix needs" in shown
    assert "Done: 1 epoch" in shown


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("classes", [2, 21])
def test_any_number_of_classes_and_any_names_are_drawn(classes, tmp_path):
    out = Report(stream := io.StringIO())
    counts = np.eye(classes, dtype=int)
    counts[1, 0] = 1234
    names = [r"$x^\frac$", "a\x1b[2J", "猫", ""]
    confusion.show(counts, tmp_path / "a.png", names, out)
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert stream.getvalue() == "Confused  a\\x1b[2J as $x^\\frac$: 1,234\n"
    confusion.show(np.eye(classes, dtype=int), tmp_path / "a.png", (), out)
    assert stream.getvalue().endswith("Confused  no example\n")
