"""results.png and sweep.png: drawn for every kind of figures, and atomically."""

import math
import os
import subprocess
import sys

import pytest

from tests.sweep_table_test import of_speeds
from towers.curves import best_epoch, draw_curves, draw_or_warn
from towers.run_dir import Result
from towers.sweep.chart import draw_sweep
from towers.sweep.machine import Machine

PNG = b"\x89PNG\r\n\x1a\n"
GPUS = Machine("NVIDIA H100", 16)


def results(*val_accuracies):
    """Epochs with these validation accuracies, a loss that is their complement."""
    return [
        Result(i + 1, 1 - value, value, 1 - value, value, 1.0, 1.0)
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


def test_without_an_epoch_there_is_no_picture(tmp_path):
    draw_curves(tmp_path / "results.png", [], "cnn on mnist")
    assert os.listdir(tmp_path) == []


def test_a_picture_that_fails_leaves_the_old_one(tmp_path):
    (tmp_path / "results.png").write_text("old")
    with pytest.raises(TypeError):
        draw_curves(tmp_path / "results.png", [results(0.5)[0]._replace(loss="x")], "cnn")
    assert (tmp_path / "results.png").read_text() == "old"
    assert os.listdir(tmp_path) == ["results.png"]


def test_what_cannot_be_drawn_is_a_warning(tmp_path):
    warnings = []
    rows = [list(result) for result in results(0.5, 0.6)]
    draw_or_warn(tmp_path / "nowhere", rows, "cnn", "val_loss", warnings.append)
    (warning,) = warnings
    assert warning.startswith("results.png cannot be drawn (FileNotFoundError: ")
    draw_or_warn(tmp_path, rows, "cnn", "val_loss", warnings.append)
    assert len(warnings) == 1 and os.listdir(tmp_path) == ["results.png"]


def test_the_best_epoch_has_the_highest_accuracy_or_the_lowest_loss():
    epochs = results(0.2, math.nan, 0.9, 0.9, 0.4)
    assert best_epoch(epochs, "val_accuracy").epoch == 3  # the first of the two
    assert best_epoch(epochs, "loss").epoch == 3
    assert best_epoch(results(math.nan), "val_loss") is None


@pytest.mark.parametrize(
    "speeds",
    [
        {(64, 1): 100},
        {(64, 2): 100, (128, 1): None},
        {(64, 1): 100, (64, 2): 50, (128, 1): 100, (128, 2): 150},
        {(64, 1): 1000, (64, 2): 50},
    ],
)
def test_a_sweep_is_drawn_whatever_cells_are_done(speeds, tmp_path):
    rows = [row._replace(val_accuracy=0.5) for row in of_speeds(speeds)]
    draw_sweep(tmp_path / "sweep.png", rows, "cnn on mnist", "a note", GPUS)
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG)


def test_a_sweep_without_a_cell_done_has_no_picture(tmp_path):
    draw_sweep(tmp_path / "sweep.png", of_speeds({(64, 1): None}), "cnn", "", GPUS)
    assert os.listdir(tmp_path) == []


def test_neither_matplotlib_nor_tensorflow_is_imported_before_it_is_needed():
    code = (
        "import sys, towers.curves, towers.sweep.run\n"
        "assert not {'matplotlib', 'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
