"""results.png is drawn for every kind of figures; any chart is a whole PNG of the right size."""

import math
import os
import struct
import subprocess
import sys
from unittest import mock

import pytest
from matplotlib.figure import Figure

from towers.app.reporting.charts import draw_curves, figure_file
from towers.resume.train_state import Monitor


@pytest.mark.parametrize("values", [
    [], [0.5], [k / 100 for k in range(100)], [math.nan], [0.1, math.nan, -math.inf],
])
@pytest.mark.parametrize("columns", [
    ["loss"], ["loss", "val_loss"], ["loss", "accuracy", "b", "c", "val_loss", "val_accuracy"],
])
def test_curves_are_drawn_for_any_epochs_and_columns(columns, values, tmp_path):
    shown = dict.fromkeys(columns, values) if values else {}
    draw_curves(tmp_path / "results.png", shown, "a run", Monitor(columns[-1]))
    assert os.listdir(tmp_path) == (["results.png"] if values else [])


def test_each_metric_has_a_chart_which_marks_the_best_epoch_and_leaves_gaps(tmp_path):
    maes = [1, 2, 3]
    rows = {"loss": [0.5] * 3, "mae": maes, "val_loss": [3.0, math.nan, 0.01], "val_mae": maes}
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as savefig:
        draw_curves(tmp_path / "results.png", rows, "a run", Monitor("val_loss", highest=False))
    loss, mae = savefig.call_args.args[0].axes
    assert (loss.get_yscale(), mae.get_yscale()) == ("log", "linear")
    training, validation, _, best = loss.lines
    assert list(training.get_ydata()) == [0.5] * 3
    assert [math.isnan(y) for y in validation.get_ydata()] == [False, True, False]
    assert best.get_label() == "best, epoch 3: 0.01"
    assert mae.lines[-1].get_label() == "best, epoch 3: 3"


def test_neither_matplotlib_nor_tensorflow_is_imported_before_it_is_needed():
    code = (
        "import sys, towers.app.reporting.charts, towers.app.sweep.run_cells\n"
        "assert not {'matplotlib', 'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_picture_has_its_words_and_120_pixels_an_inch(tmp_path):
    with figure_file(tmp_path / "a.png", 4.0, 2.5, "a title", "a note") as figure:
        figure.subplots().plot([1, 2], [3, 4])
    assert (figure.get_suptitle(), figure.get_supxlabel()) == ("a title", "a note")
    content = (tmp_path / "a.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (480, 300)  # its header's first two numbers


def test_a_picture_that_fails_leaves_the_old_one_alone(tmp_path):
    (tmp_path / "a.png").write_text("old")
    with pytest.raises(ZeroDivisionError):
        with figure_file(tmp_path / "a.png", 4.0, 2.5, "a title"):
            1 / 0
    assert (tmp_path / "a.png").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.png"]
