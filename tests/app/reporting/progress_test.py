"""The lines of an epoch, from a train_state that the test moves; its pace."""

import io
from types import SimpleNamespace

import pytest

from towers.app.config import TrainConfig
from towers.app.reporting import progress
from towers.app.reporting.progress import ProgressLines
from towers.app.reporting.report import Report
from towers.app.reporting.time_spent import TimeSpent
from towers.resume.train_state import TrainState


LOGS = {"loss": 0.5, "accuracy": 0.75, "val_loss": 0.25, "val_accuracy": 0.875}


class Case:
    """A run of 4 steps an epoch, as much of it as is looked at, after 2 steps of its epoch 2."""

    def __init__(self):
        self.optimizer = SimpleNamespace(iterations=6, dynamic_scale=16384.0)
        self.state = TrainState(
            step=6, epoch=1, epoch_step=2, logs={"loss": 0.5, "accuracy": 0.75}, best_step=4
        )
        self._stream = io.StringIO()
        self.out = Report(self._stream)
        self.run = run = SimpleNamespace(
            config=TrainConfig(epochs=12),
            step=SimpleNamespace(optimizer=self.optimizer, tower_devices=["/cpu:0"]),
            steps_an_epoch=4,
            num_steps=48,
            metrics=["loss", "accuracy"],
            columns=list(LOGS),
            first_iteration=0,
            test=object(),
        )
        self.lines = ProgressLines(self.out, run, self.state, TimeSpent())
        pace = SimpleNamespace(examples_per_second=3912.3, seconds_left=41.2, num_timed=0)
        self.pace = self.lines.pace = pace

    @property
    def said(self):
        return self._stream.getvalue().splitlines()


@pytest.mark.parametrize(
    "seconds, price, lines",
    [
        (4200.0, 2.1, ["100 s a step: 1:10:00 to the end, and validation; 2.45 at 2.10 an hour"]),
        (9.0, 2.1, []),
        (None, None, []),
    ],
)
def test_after_20_steps_one_line_tells_when_the_run_will_end(seconds, price, lines):
    case = Case()
    case.run.config = TrainConfig(price=price)
    case.pace.seconds_left = seconds
    for case.pace.num_timed in (19, 20, 21):
        case.lines.on_train_batch_end(1)
    assert case.said == [f"Time      {line}" for line in lines]


def test_a_step_is_shown_when_it_is_time_and_fits_80_columns_but_for_the_speed(monkeypatch):
    case = Case()
    case.lines.on_train_batch_end(1)
    assert case.said == []
    monkeypatch.setattr(Report, "is_due", lambda self: True)
    monkeypatch.setattr(progress, "peak_memory", lambda devices: 1_234_567_890)
    for case.state.epoch_step in range(1, 5):
        case.lines.on_train_batch_end(1)
    text = "{}] {}/4  loss 0.5000  accuracy 0.750 | 0:41 left | 3,912 examples/s | 1.2 GB"
    assert case.said == [
        "Epoch  2/12  [" + text.format("===" * step + "   " * (4 - step), step)
        for step in range(1, 5)
    ]


@pytest.mark.parametrize(
    "logs, best_step, second",
    [
        (LOGS, 6, ["             val_loss 0.2500  val_accuracy 0.875  (best)"]),
        (LOGS, 4, ["             val_loss 0.2500  val_accuracy 0.875"]),
        ({"loss": 0.5, "accuracy": 0.75}, 4, []),
    ],
)
def test_an_epoch_has_two_lines(logs, best_step, second):
    case = Case()
    case.state.best_step, case.run.columns = best_step, list(logs)
    case.lines.on_epoch_end(1, logs)
    first = "Epoch  2/12  loss 0.5000  accuracy 0.750 | 3,912 examples/s | 0:41 left"
    assert case.said == [first, *second]
    case.pace.seconds_left = None
    case.lines.on_epoch_end(1, logs)
    assert f"{first.removesuffix(' | 0:41 left')}" in case.said
    case.run.columns.append("noise_scale")  # a value of the training steps alone
    case.lines.on_epoch_end(1, {**logs, "noise_scale": 64.0})
    assert "accuracy 0.750  noise_scale 64.0000 | 3,912 examples/s" in "".join(case.said)


def test_updates_that_this_epoch_has_left_out_are_warned_of():
    """One before, and two of this epoch's; the optimizer counts none of the three."""
    case = Case()
    case.optimizer.iterations = 5
    case.lines.on_epoch_begin(1)
    case.state.step, case.optimizer.iterations = 9, 6
    case.lines.end_steps()
    assert case.said == [
        "Warning   2 updates left out in this epoch: a NaN or infinite loss or gradient; the loss "
        "scale is 16,384 now."
    ]


@pytest.fixture
def clock(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_the_first_step_counts_only_while_it_is_the_only_one(clock):
    pace = progress.Pace(10)
    assert pace.examples_per_second == 0
    pace.start_epoch()
    clock[0] += 8
    pace.add_step(32)
    assert (pace.examples_per_second, pace.seconds_left) == (4, None)
    clock[0] += 1
    pace.add_step(32)
    clock[0] += 3
    pace.add_step(32)
    assert pace.examples_per_second == 16
    assert pace.epoch_seconds == 12


def test_the_time_left_counts_steps_and_validations(clock):
    pace = progress.Pace(6)
    pace.start_epoch()
    for _ in range(3):
        clock[0] += 2
        pace.add_step(32)
    assert pace.seconds_left == 3 * 2
    clock[0] += 4  # a validation
    pace.start_epoch()
    assert pace.seconds_left == 3 * 4
    for _ in range(3):
        clock[0] += 2
        pace.add_step(32)
    assert (pace.examples_per_second, pace.seconds_left) == (16, None)
