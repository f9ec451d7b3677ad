"""Speed and time left, on a clock that the test moves."""

import pytest

from towers.app.training import pace as pace_lib


@pytest.fixture
def clock(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(pace_lib.time, "perf_counter", lambda: now[0])
    return now


def test_the_first_step_counts_only_while_it_is_the_only_one(clock):
    pace = pace_lib.Pace(num_steps=10, num_epochs=2)
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
    pace = pace_lib.Pace(num_steps=6, num_epochs=2)
    pace.start_epoch()
    for _ in range(3):
        clock[0] += 2
        pace.add_step(32)
    assert pace.seconds_left == 3 * 2  # no validation is timed yet
    clock[0] += 5
    pace.end_epoch()
    pace.start_epoch()
    assert pace.seconds_left == 3 * 2 + 5
    clock[0] += 4
    pace.add_step(32)
    assert (pace.examples_per_second, pace.seconds_left) == (8, 2 * 4 + 5)


def test_nothing_is_left_after_the_last_epoch(clock):
    pace = pace_lib.Pace(num_steps=2, num_epochs=1)
    for _ in range(2):
        clock[0] += 1
        pace.add_step(32)
    pace.end_epoch()
    assert pace.seconds_left is None
    assert pace.run_seconds == 2
