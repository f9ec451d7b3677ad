"""sweep.png, for whatever cells are done."""

import pytest

from tests.app.sweep.rows import of_speeds
from towers.app.sweep.chart import draw_sweep


@pytest.mark.parametrize("speeds", [
    {(64, 1): 100},
    {(64, 2): 100, (128, 1): 100},
    {(64, 1): 1000, (64, 2): 50, (128, 1): 100, (128, 2): 150},
])
def test_a_sweep_is_drawn_whatever_cells_are_done(speeds, tmp_path):
    draw_sweep(tmp_path / "sweep.png", of_speeds(speeds), "cnn on mnist", "a note")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
