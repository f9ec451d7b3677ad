"""The best epoch, by any monitored value; and patience."""

import math

import pytest

from towers.resume.train_state import Best, Monitor, find_monitor

LOWEST_LOSS = Monitor("val_loss", highest=False)
DIRECTIONS = {"loss": "down", "mae": "down", "auc": "up", "mean": None}
COLUMNS = [*DIRECTIONS, *(f"val_{name}" for name in DIRECTIONS)]


def after(values, monitor, **others):
    """The best of epochs of 10 updates with these monitored values."""
    best = Best()
    for epoch, value in enumerate(values, 1):
        logs = {"val_loss": 1.0, **others, monitor.column: value}
        best = best.after_epoch(logs, monitor, 10 * epoch)
    return best


@pytest.mark.parametrize(
    ("monitor", "values", "expected"),
    [
        (Monitor(), [0.1, 0.9, 0.8], Best(0.9, 20, 1)),
        (LOWEST_LOSS, [0.1, 0.9, 0.8], Best(-0.1, 10, 2)),
        (Monitor("loss", False), [3.0, 2.0, 1.0], Best(-1.0, 30, 0)),
        (Monitor("accuracy", True), [0.5, 0.5, 0.5], Best(0.5, 10, 2)),
        (Monitor(), [], Best(None, None, 0)),
    ],
)
def test_the_first_of_the_best_epochs_counts(monitor, values, expected):
    assert after(values, monitor) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_epoch_that_is_not_finite_is_never_the_best(value):
    assert after([value], LOWEST_LOSS) == Best(None, None, 1)
    assert after([value, 0.5], LOWEST_LOSS) == Best(-0.5, 20, 0)
    assert after([0.9], Monitor(), val_loss=value) == Best(None, None, 1)


def test_patience_ends_after_as_many_epochs_without_a_better_one():
    best = after([0.9, 0.8, 0.7], Monitor())
    assert [best.is_too_old(patience) for patience in (1, 2, 3, None)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("values", "lowest", "highest"),
    [
        ([0.5, 0.1, 0.9, 0.9, 0.1], 1, 2),
        ([math.nan, 0.5, -math.inf], 1, 1),
        ([math.nan], None, None),
        ([], None, None),
    ],
)
def test_the_best_index_is_the_first_among_the_finite_values(values, lowest, highest):
    found = [Monitor("x", best).best_index(values) for best in (False, True)]
    assert found == [lowest, highest]


@pytest.mark.parametrize(
    ("columns", "expected"),
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
    ("column", "mode", "highest"),
    [("val_auc", "auto", True), ("mae", "auto", False), ("val_loss", "auto", False),
     ("val_mean", "max", True), ("auc", "min", False)],
)
def test_the_direction_is_the_metrics_or_what_is_asked_for(column, mode, highest):
    assert find_monitor(column, mode, DIRECTIONS, COLUMNS) == Monitor(column, highest)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("val_acc", r"monitor \('val_acc'\) must be a column: loss, mae, auc, mean, val_loss, "),
        ("val_mean", "does not know whether its highest .* monitor_mode=max or monitor_mode=min"),
    ],
)
def test_a_column_that_is_not_there_or_has_no_direction_is_refused(column, message):
    with pytest.raises(ValueError, match=message):
        find_monitor(column, "auto", DIRECTIONS, COLUMNS)
