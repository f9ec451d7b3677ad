"""Which of Keras' methods a model's class replaces."""

import keras
import pytest

from towers.overrides import overrides, own_loss


class Old(keras.Model):
    """From before Keras told `compute_loss` whether it trains."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return "old", x, y, y_pred, sample_weight


class New(Old):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return "new", x, y, y_pred, sample_weight, training


def test_a_method_is_replaced_by_the_class_or_by_one_above_it():
    class Child(New):
        pass

    assert overrides(Old(), "compute_loss") and overrides(Child(), "compute_loss")
    assert not overrides(Child(), "train_step")
    assert not overrides(keras.Sequential(), "compute_loss")


@pytest.mark.parametrize("cls, expected", [
    (Old, ("old", 1, 2, 3, 4)), (New, ("new", 1, 2, 3, 4, False)),
])
def test_a_loss_is_told_whether_it_trains_if_it_asks(cls, expected):
    assert own_loss(cls(), 1, 2, 3, 4, training=False) == expected
