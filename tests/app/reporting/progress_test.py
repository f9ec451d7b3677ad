"""The lines of an epoch, from a train_state that the test moves."""

import io
from types import SimpleNamespace

import pytest

from tests.results import classifier_result
from towers.resume.best import Best
from towers.resume.train_state import TrainState
from towers.app.config import TrainConfig
from towers.app.reporting.outcome import num_skipped
from towers.app.reporting.progress import ProgressLines, skipped_line
from towers.app.reporting.report import Report

RESULT = classifier_result(2, 0.5, 0.75, 0.25, 0.875, 12.0, 3912.3)


@pytest.fixture(name="stream")
def _stream():
    return io.StringIO()


def run_of(iterations, is_sequential=False, **optimizer):
    """As much of a run as is looked at: 4 steps an epoch, and an optimizer's counts."""
    step = SimpleNamespace(optimizer=SimpleNamespace(iterations=iterations, **optimizer))
    return SimpleNamespace(
        config=TrainConfig(epochs=12), step=step, batch_size=8,
        train=SimpleNamespace(source=SimpleNamespace(is_sequential=is_sequential)),
        steps_an_epoch=4, metrics=["loss", "accuracy"],
        first_iteration=0,
    )


def lines_of(stream, run):
    train_state = TrainState(step=6, epoch=1, epoch_step=2, logs={"loss": 0.5, "accuracy": 0.75})
    pace = SimpleNamespace(examples_per_second=3912.3, seconds_left=41.2)
    return train_state, pace, ProgressLines(Report(stream), run, train_state, pace)


def test_a_step_is_shown_when_it_is_time(stream, monkeypatch):
    _, _, lines = lines_of(stream, run_of(6))
    lines.on_epoch_begin(1)
    lines.on_train_batch_end(1)
    assert stream.getvalue() == ""
    monkeypatch.setattr(Report, "is_due", lambda self: True)
    lines.on_train_batch_end(1)
    assert stream.getvalue() == (
        "Epoch  2/12  step 2/4  loss 0.5000  accuracy 0.750 | 3,912 examples/s | 0:41 left\n"
    )


@pytest.mark.parametrize(("best_step", "mark"), [(6, "  (best)"), (4, "")])
def test_an_epoch_has_two_lines_with_the_time_left_after_validation(stream, best_step, mark):
    train_state, pace, lines = lines_of(stream, run_of(6))
    lines.on_epoch_begin(1)
    lines.on_test_begin()
    train_state.epoch, train_state.epoch_step, train_state.logs = 2, 0, {}
    train_state.best = Best(0.875, best_step)
    pace.seconds_left = 63.0
    lines.on_epoch_end(1, RESULT.values)
    assert stream.getvalue().splitlines() == [
        "Epoch  2/12  loss 0.5000  accuracy 0.750 | 3,912 examples/s | 1:03 left",
        f"             val_loss 0.2500  val_accuracy 0.875{mark}",
    ]


def test_updates_that_this_epoch_has_left_out_are_warned_of_before_its_lines(stream):
    """One before, and two of this epoch's; the optimizer counts none of the three."""
    run = run_of(5, dynamic_scale=16384.0)
    train_state, _, lines = lines_of(stream, run)
    lines.on_epoch_begin(1)
    train_state.step += 3
    run.step.optimizer.iterations += 1
    lines.on_test_begin()
    assert num_skipped(run, train_state) == 3
    assert stream.getvalue() == (
        "Warning   2 updates left out in this epoch: a NaN or infinite loss or gradient; the loss "
        "scale is 16,384 now.\n"
    )


def test_what_takes_a_while_without_a_step_is_said(stream, monkeypatch):
    _, _, lines = lines_of(stream, run_of(6))
    said = []
    monkeypatch.setattr(Report, "waiting", lambda self, what: said.append(what))
    lines.on_train_begin()
    lines.on_epoch_begin(1)
    lines.on_test_begin()
    assert said == ["Epoch  2/12  preparing the first step", "Epoch  2/12  validating"]


def lines(is_sequential, epoch_step):
    said = []
    out = SimpleNamespace(line=lambda text: said.append(str(text)))
    state = SimpleNamespace(epoch_step=epoch_step, step=0)
    shown = ProgressLines(out, run_of(0, is_sequential), state, None)
    shown.on_epoch_begin(1)
    shown.on_train_batch_begin(epoch_step)
    shown.on_train_batch_begin(epoch_step + 1)
    return said


def test_an_epoch_that_goes_on_says_once_what_it_has_left_out():
    said, = lines(is_sequential=True, epoch_step=3)
    assert said.startswith("Data      24 examples of this epoch read again and left out, in ")


@pytest.mark.parametrize(("is_sequential", "epoch_step"), [(True, 0), (False, 3)])
def test_nothing_is_said_where_nothing_was_left_out(is_sequential, epoch_step):
    assert lines(is_sequential, epoch_step) == []


def test_the_line_tells_examples_and_time():
    assert "1,280 examples" in str(skipped_line(1280, 75.0)) and "1:15" in str(skipped_line(1, 75))
