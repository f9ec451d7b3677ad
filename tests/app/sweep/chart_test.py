"""sweep.png, for whatever cells are done."""

import os

import pytest

from tests.app.sweep.table_test import of_speeds
from towers.app.sweep.cells import Machine
from towers.app.sweep.chart import draw_sweep

PNG = b"\x89PNG\r\n\x1a\n"
GPUS = Machine("NVIDIA H100", 16)


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
