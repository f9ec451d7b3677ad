"""The best epoch of a run, by the column that a user names or the default."""

import math

import pytest

from towers.app.monitor import Monitor, find_monitor
from towers.resume.train_state import TrainState

LOWEST_LOSS = Monitor("val_loss", highest=False)
DIRECTIONS = {"loss": "down", "mae": "down", "auc": "up", "mean": None}
COLUMNS = [*DIRECTIONS, *(f"val_{name}" for name in DIRECTIONS), "noise_scale"]


def best_of(train_state):
    return train_state.best, train_state.best_step, train_state.epochs_since_best


def best_after(values, monitor, **others):
    """The best of epochs of 10 updates with these monitored values."""
    train_state = TrainState()
    for epoch, value in enumerate(values, 1):
        train_state.step = 10 * epoch
        logs = {"val_loss": 1.0, **others, monitor.column: value}
        train_state.end_epoch([], logs, monitor.score(logs))
    return best_of(train_state)


@pytest.mark.parametrize(
    "monitor, values, expected",
    [
        (Monitor(), [0.1, 0.9, 0.8], (0.9, 20, 1)),
        (LOWEST_LOSS, [0.1, 0.9, 0.8], (-0.1, 10, 2)),
        (Monitor("accuracy", True), [0.5, 0.5, 0.5], (0.5, 10, 2)),
    ],
)
def test_the_first_of_the_best_epochs_counts(monitor, values, expected):
    assert best_after(values, monitor) == expected


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_epoch_that_is_not_finite_is_never_the_best(value):
    assert best_after([value, 0.5], LOWEST_LOSS) == (-0.5, 20, 0)
    assert best_after([0.9], Monitor(), val_loss=value) == (None, None, 1)


def test_among_equal_values_the_lowest_loss_is_the_best_without_postponing_the_early_stop():
    train_state, losses = TrainState(), [1.0, 0.05, 0.5]
    for loss in losses:
        train_state.step += 10
        values = {"loss": 1.0, "val_loss": loss, "val_accuracy": 0.9}
        train_state.end_epoch([], values, Monitor().score(values))
        train_state = TrainState.from_json(train_state.to_json())  # as from a checkpoint
    assert best_of(train_state) == (0.9, 20, 2)
    assert Monitor().best_index({"val_accuracy": [0.9] * 3, "val_loss": losses}) == 1
    older = {**train_state.to_json(), "best_loss": None}  # the loss of its best is not known
    train_state = TrainState.from_json(older)
    values["val_loss"] = 0.01
    train_state.end_epoch([], values, Monitor().score(values))
    assert train_state.best_step == 20


@pytest.mark.parametrize(
    "columns, expected",
    [
        (["loss", "accuracy", "val_loss", "val_accuracy"], "val_accuracy"),
        (["loss", "mae", "val_loss", "val_mae"], "val_loss"),
        (["loss", "accuracy"], "loss"),
    ],
)
def test_the_default_is_what_there_is_of_validation(columns, expected):
    directions = {"loss": "down", "accuracy": "up"}
    assert find_monitor(None, "auto", directions, columns).column == expected


@pytest.mark.parametrize(
    "column, mode, highest",
    [
        ("val_auc", "auto", True),
        ("mae", "auto", False),
        ("val_mean", "max", True),
    ],
)
def test_the_direction_is_the_metrics_or_what_is_asked_for(column, mode, highest):
    assert find_monitor(column, mode, DIRECTIONS, COLUMNS) == Monitor(column, highest)


@pytest.mark.parametrize(
    "column, message",
    [
        ("val_acc", r"monitor \('val_acc'\) must be a column: loss, mae, auc, mean, val_loss, "),
        ("val_mean", "does not know whether its highest .* monitor_mode=max or monitor_mode=min"),
    ],
)
def test_a_column_that_is_not_there_or_has_no_direction_is_refused(column, message):
    with pytest.raises(ValueError, match=message):
        find_monitor(column, "auto", DIRECTIONS, COLUMNS)
