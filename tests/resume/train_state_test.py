"""Where a run stands, in memory and as JSON; the best epoch, by any value; how it is fed."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from towers.app.config import TrainConfig
from towers.resume.source import InputOptions, num_steps
from towers.resume.train_state import Monitor, TrainState, find_monitor, plain

LOWEST_LOSS = Monitor("val_loss", highest=False)
DIRECTIONS = {"loss": "down", "mae": "down", "auc": "up", "mean": None}
COLUMNS = [*DIRECTIONS, *(f"val_{name}" for name in DIRECTIONS)]


def row(epoch, accuracy=0.5):
    return [epoch, 1.0, accuracy, 1.0, accuracy, 1.0, 1.0]


def logs(accuracy=0.5):
    return {"loss": 1.0, "accuracy": accuracy, "val_loss": 1.0, "val_accuracy": accuracy}


def best_of(train_state):
    return train_state.best, train_state.best_step, train_state.epochs_since_best


def two_epochs_and_a_step():
    train_state = TrainState()
    for epoch, accuracy in enumerate([0.75, 0.5], 1):
        for _ in range(4):
            train_state.add_step({"loss": tf.constant(1.0)})
        train_state.end_epoch(row(epoch, accuracy), logs(accuracy), Monitor())
    train_state.add_step({"loss": tf.constant(0.5)})
    return train_state


def test_it_counts_steps_and_epochs():
    train_state = two_epochs_and_a_step()
    assert (train_state.step, train_state.epoch, train_state.epoch_step) == (9, 2, 1)
    assert train_state.history["val_accuracy"] == [0.75, 0.5]
    assert [values[0] for values in train_state.results] == [1, 2]
    assert best_of(train_state) == (0.75, 4, 1)


def test_json_brings_it_back():
    train_state = two_epochs_and_a_step()
    saved = train_state.to_json()
    train_state.end_epoch(row(3), logs(), Monitor())  # changes nothing of what is saved
    train_state = two_epochs_and_a_step()
    again = TrainState.from_json(json.loads(json.dumps(saved)))
    assert again.logs == {"loss": 0.5}
    train_state.logs = again.logs
    assert again == train_state


def test_a_checkpoint_keeps_its_fields_and_one_without_the_newest_is_read():
    fields = {
        "step": 0, "epoch": 0, "epoch_step": 0, "logs": {}, "history": {}, "results": [],
        "best": None, "best_step": None, "epochs_since_best": 0, "stopped": False,
    }
    assert TrainState().to_json() == {**fields, "best_saved": None}
    assert TrainState.from_json(fields) == TrainState()


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="phase"):
        TrainState.from_json({**TrainState().to_json(), "phase": 1})


def test_a_run_is_stopped_by_a_callback_or_for_lack_of_a_better_epoch():
    train_state = two_epochs_and_a_step()
    assert [train_state.is_stopped(patience) for patience in (None, 1, 2)] == [False, True, False]
    train_state.epochs_since_best = 2
    assert train_state.is_stopped(1) and train_state.is_stopped(2)
    train_state.stopped = True
    assert train_state.is_stopped(None)


@pytest.mark.parametrize("make", [lambda: 2, lambda: np.float32(2), lambda: np.array(2),
                                  lambda: tf.constant(2.0)])
def test_numbers_become_pythons(make):
    value = make()
    assert plain(value) == 2 and type(plain(value)) in (int, float)


def best_after(values, monitor, **others):
    """The best of epochs of 10 updates with these monitored values."""
    train_state = TrainState()
    for epoch, value in enumerate(values, 1):
        train_state.step = 10 * epoch
        logs = {"val_loss": 1.0, **others, monitor.column: value}
        train_state.end_epoch(row(epoch), logs, monitor)
    return best_of(train_state)


@pytest.mark.parametrize("monitor, values, expected", [
    (Monitor(), [0.1, 0.9, 0.8], (0.9, 20, 1)),
    (LOWEST_LOSS, [0.1, 0.9, 0.8], (-0.1, 10, 2)),
    (Monitor("loss", False), [3.0, 2.0, 1.0], (-1.0, 30, 0)),
    (Monitor("accuracy", True), [0.5, 0.5, 0.5], (0.5, 10, 2)),
    (Monitor(), [], (None, None, 0)),
])
def test_the_first_of_the_best_epochs_counts(monitor, values, expected):
    assert best_after(values, monitor) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_epoch_that_is_not_finite_is_never_the_best(value):
    assert best_after([value], LOWEST_LOSS) == (None, None, 1)
    assert best_after([value, 0.5], LOWEST_LOSS) == (-0.5, 20, 0)
    assert best_after([0.9], Monitor(), val_loss=value) == (None, None, 1)


@pytest.mark.parametrize("values, lowest, highest", [
    ([0.5, 0.1, 0.9, 0.9, 0.1], 1, 2),
    ([math.nan, 0.5, -math.inf], 1, 1),
    ([math.nan], None, None),
    ([], None, None),
])
def test_the_best_index_is_the_first_among_the_finite_values(values, lowest, highest):
    found = [Monitor("x", best).best_index(values) for best in (False, True)]
    assert found == [lowest, highest]


@pytest.mark.parametrize("columns, expected", [
    (["loss", "accuracy", "val_loss", "val_accuracy"], "val_accuracy"),
    (["loss", "mae", "val_loss", "val_mae"], "val_loss"),
    (["loss", "accuracy"], "loss"),
])
def test_the_default_is_what_there_is_of_validation(columns, expected):
    directions = {"loss": "down", "accuracy": "up"}
    assert find_monitor(None, "auto", directions, columns).column == expected


@pytest.mark.parametrize("column, mode, highest", [
    ("val_auc", "auto", True), ("mae", "auto", False), ("val_loss", "auto", False),
    ("val_mean", "max", True), ("auc", "min", False),
])
def test_the_direction_is_the_metrics_or_what_is_asked_for(column, mode, highest):
    assert find_monitor(column, mode, DIRECTIONS, COLUMNS) == Monitor(column, highest)


@pytest.mark.parametrize("column, message", [
    ("val_acc", r"monitor \('val_acc'\) must be a column: loss, mae, auc, mean, val_loss, "),
    ("val_mean", "does not know whether its highest .* monitor_mode=max or monitor_mode=min"),
])
def test_a_column_that_is_not_there_or_has_no_direction_is_refused(column, message):
    with pytest.raises(ValueError, match=message):
        find_monitor(column, "auto", DIRECTIONS, COLUMNS)


def test_the_defaults_are_those_of_a_run():
    config = TrainConfig()
    assert InputOptions() == tuple(getattr(config, name) for name in InputOptions._fields)


@pytest.mark.parametrize(("num_examples", "expected"), [(1, 1), (10, 1), (11, 2), (20, 2)])
def test_the_last_partial_batch_is_a_step(num_examples, expected):
    assert num_steps(num_examples, batch_size=10) == expected
