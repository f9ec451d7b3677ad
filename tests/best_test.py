"""The best epoch, by any monitored value; and patience."""

import math

import pytest

from towers.best import Best, best_index, score


def after(values, monitor, **others):
    """The best of epochs of 10 updates with these monitored values."""
    best = Best()
    for epoch, value in enumerate(values, 1):
        best = best.after_epoch({"val_loss": 1.0, **others, monitor: value}, monitor, 10 * epoch)
    return best


@pytest.mark.parametrize(
    ("monitor", "values", "expected"),
    [
        ("val_accuracy", [0.1, 0.9, 0.8], Best(0.9, 20, 1)),
        ("val_loss", [0.1, 0.9, 0.8], Best(-0.1, 10, 2)),
        ("loss", [3.0, 2.0, 1.0], Best(-1.0, 30, 0)),
        ("accuracy", [0.5, 0.5, 0.5], Best(0.5, 10, 2)),
        ("val_accuracy", [], Best(None, None, 0)),
    ],
)
def test_the_first_of_the_best_epochs_counts(monitor, values, expected):
    assert after(values, monitor) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_epoch_that_is_not_finite_is_never_the_best(value):
    assert after([value], "val_loss") == Best(None, None, 1)
    assert after([value, 0.5], "val_loss") == Best(-0.5, 20, 0)
    assert after([0.9], "val_accuracy", val_loss=value) == Best(None, None, 1)


def test_patience_ends_after_as_many_epochs_without_a_better_one():
    best = after([0.9, 0.8, 0.7], "val_accuracy")
    assert [best.is_too_old(patience) for patience in (1, 2, 3, None)] == [True, True, False, False]


def test_a_better_epoch_has_a_higher_score():
    assert score(0.25, "val_accuracy") == 0.25
    assert score(0.25, "val_loss") == -0.25


@pytest.mark.parametrize(
    ("values", "loss", "accuracy"),
    [
        ([0.5, 0.1, 0.9, 0.9, 0.1], 1, 2),
        ([math.nan, 0.5, -math.inf], 1, 1),
        ([math.nan], None, None),
        ([], None, None),
    ],
)
def test_the_best_index_is_the_first_among_the_finite_values(values, loss, accuracy):
    assert (best_index(values, "loss"), best_index(values, "accuracy")) == (loss, accuracy)
