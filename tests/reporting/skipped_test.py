"""The line of what was read only to be left out."""

from types import SimpleNamespace

import pytest

from towers.reporting.skipped import SkippedLine, skipped_line


def lines(is_sequential, epoch_step):
    said = []
    source = SimpleNamespace(is_sequential=is_sequential)
    run = SimpleNamespace(train=SimpleNamespace(source=source), batch_size=8)
    out = SimpleNamespace(line=lambda text: said.append(str(text)))
    listener = SkippedLine(out, run, SimpleNamespace(epoch_step=epoch_step))
    for moment in (listener.begin_epoch, listener.begin_step, listener.begin_step):
        moment()
    return said


def test_an_epoch_that_goes_on_says_once_what_it_has_left_out():
    said, = lines(is_sequential=True, epoch_step=3)
    assert said.startswith("Data      24 examples of this epoch read again and left out, in ")


@pytest.mark.parametrize(("is_sequential", "epoch_step"), [(True, 0), (False, 3)])
def test_nothing_is_said_where_nothing_was_left_out(is_sequential, epoch_step):
    assert lines(is_sequential, epoch_step) == []


def test_the_line_tells_examples_and_time():
    assert "1,280 examples" in str(skipped_line(1280, 75.0)) and "1:15" in str(skipped_line(1, 75))
