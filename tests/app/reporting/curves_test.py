"""results.png: drawn for every kind of figures, and atomically."""

import math
import os
import subprocess
import sys

import pytest

from tests.results import COLUMNS, classifier_result
from towers.resume.best import Monitor
from towers.app.reporting.curves import best_epoch, draw_curves, draw_or_warn

LOWEST_LOSS = Monitor("val_loss", highest=False)
PNG = b"\x89PNG\r\n\x1a\n"


def results(*val_accuracies):
    """Epochs with these validation accuracies, a loss that is their complement."""
    return [
        classifier_result(i + 1, 1 - value, value, 1 - value, value, 1.0, 1.0)
        for i, value in enumerate(val_accuracies)
    ]


@pytest.mark.parametrize(
    "values",
    [[0.5], [0.1, 0.9, 0.8], [k / 100 for k in range(100)], [math.nan], [0.1, math.nan, -math.inf]],
)
def test_curves_are_drawn_for_any_number_of_epochs_finite_or_not(values, tmp_path):
    draw_curves(tmp_path / "results.png", results(*values), "cnn on mnist")
    assert (tmp_path / "results.png").read_bytes().startswith(PNG)
    assert os.listdir(tmp_path) == ["results.png"]


@pytest.mark.parametrize("columns", [
    ["loss"], ["loss", "mae"], ["loss", "val_loss"], ["loss", "a", "b", "c", "val_loss", "val_a"],
])
def test_each_metric_has_its_chart_with_validation_or_without(columns, tmp_path):
    rows = [[epoch, *range(len(columns)), 1.0, 1.0] for epoch in (1, 2)]
    monitor = Monitor(columns[-1], highest=False)
    draw_or_warn(tmp_path, rows, columns, "mine", monitor, pytest.fail)
    assert (tmp_path / "results.png").read_bytes().startswith(PNG)


def test_without_an_epoch_there_is_no_picture(tmp_path):
    draw_curves(tmp_path / "results.png", [], "cnn on mnist")
    assert os.listdir(tmp_path) == []


def test_a_picture_that_fails_leaves_the_old_one(tmp_path):
    (tmp_path / "results.png").write_text("old")
    with pytest.raises(TypeError):
        row = results(0.5)[0]
        row = row._replace(values={**row.values, "loss": "x"})
        draw_curves(tmp_path / "results.png", [row], "cnn")
    assert (tmp_path / "results.png").read_text() == "old"
    assert os.listdir(tmp_path) == ["results.png"]


def test_what_cannot_be_drawn_is_a_warning(tmp_path):
    warnings = []
    rows = [result.row for result in results(0.5, 0.6)]
    draw_or_warn(tmp_path / "nowhere", rows, COLUMNS, "cnn", LOWEST_LOSS, warnings.append)
    (warning,) = warnings
    assert warning.startswith("results.png cannot be drawn (FileNotFoundError: ")
    draw_or_warn(tmp_path, rows, COLUMNS, "cnn", LOWEST_LOSS, warnings.append)
    assert len(warnings) == 1 and os.listdir(tmp_path) == ["results.png"]


def test_the_best_epoch_has_the_highest_accuracy_or_the_lowest_loss():
    epochs = results(0.2, math.nan, 0.9, 0.9, 0.4)
    assert best_epoch(epochs, Monitor()).epoch == 3  # the first of the two
    assert best_epoch(epochs, Monitor("loss", highest=False)).epoch == 3
    assert best_epoch(results(math.nan), LOWEST_LOSS) is None


def test_neither_matplotlib_nor_tensorflow_is_imported_before_it_is_needed():
    code = (
        "import sys, towers.app.reporting.curves, towers.app.sweep.run_cells\n"
        "assert not {'matplotlib', 'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
