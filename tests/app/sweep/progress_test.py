"""What a sweep shows: a line a cell, the time left, and no bar in a pipe."""

import sys

import pytest

from towers.app.sweep import progress
from towers.app.sweep.cells import Cell
from towers.app.sweep.progress import Clock, cell_line, running, show
from towers.app.sweep.table import empty_row

CELL = Cell("cnn", None, 1280, 2)
ROW = empty_row(CELL, None)._replace(examples_per_second=3911.6, val_accuracy=0.95256)


@pytest.fixture
def clock(monkeypatch):
    """Of 8 cells, 3 done in 300 seconds."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    clock = Clock(8)
    for _ in range(3):
        now[0] += 100.0
        clock.add_cell()
    return clock


def test_the_time_left_is_that_of_the_cells_left_at_the_mean_of_those_done(clock):
    assert clock.left == "0:08:20 left"


@pytest.mark.parametrize("num_done", [0, 8])
def test_without_an_estimate_or_with_nothing_left_no_time_is_given(clock, num_done):
    clock.num_done = num_done
    assert clock.left == ""


def test_a_line_has_the_cells_number_its_batch_and_its_figures(clock):
    assert cell_line(ROW, clock) == (
        "3/8  cnn  batch 1,280 on 2,   640 a tower     3,912 examples/s  val_accuracy 0.953"
        " | 0:08:20 left"
    )


def test_a_failed_cells_line_has_its_error_and_numbers_are_aligned(clock):
    clock.num_cells, clock.num_done = 10, 10
    line = cell_line(ROW._replace(error="it broke."), clock)
    assert line == "10/10  cnn  batch 1,280 on 2,   640 a tower  failed: it broke."
    clock.num_done = 9
    assert cell_line(ROW, clock).startswith(" 9/10  cnn  ")


def test_in_a_pipe_there_is_no_bar(clock, capsys):
    with running(CELL, clock):
        pass
    assert capsys.readouterr().out == ""


def test_a_reader_that_has_gone_does_not_end_the_sweep(monkeypatch):
    class Gone:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    show("a line")
    assert not isinstance(sys.stdout, Gone)
    show("another")
    sys.stdout.close()
