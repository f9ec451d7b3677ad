"""Class weights, as text and as numbers."""

import math

import numpy as np
import pytest

from towers.app.class_weight import as_text, balanced, note, weights_of
from towers.app.config import TrainConfig


@pytest.mark.parametrize("value, text", [
    (None, None), ("balanced", "balanced"), ("0:1,1:5", "0:1,1:5"), ("1: 0.1, 0: 2e0", "1:0.1,0:2"),
    ({0: 1, 1: 0.1234567890123}, "0:1,1:0.1234567890123"),
    ({np.int64(3): np.float32(0.5)}, "3:0.5"),
])
def test_weights_become_one_text_that_holds_every_digit(value, text):
    assert as_text(value) == text
    config = TrainConfig(class_weight=value)
    assert TrainConfig.from_json(config.to_json()).class_weight == text
    if isinstance(value, dict):
        assert weights_of(text) == value


@pytest.mark.parametrize("value", [
    "", "0", "0:1,", "0:1,0:2", "a:1", "0:x", "-1:1", "0:-1", "0:nan", "0:inf", "0:1:2", "1.5:1",
    "9999999:1", "Balanced", {}, {0: "x"}, {0: math.inf}, {"a": 1}, {0.5: 1}, 3, [0, 1], True,
])
def test_what_is_no_class_and_weight_is_refused(value):
    message = r"^class_weight \(.*\) must be balanced, or .* such as 0:1,1:5\.$"
    with pytest.raises(ValueError, match=message):
        TrainConfig(class_weight=value)


def test_balanced_classes_count_alike_and_all_examples_what_they_did():
    labels = np.array([0] * 6 + [2] * 3 + [5])
    weights = balanced(labels)
    totals = [weights[label] * (labels == label).sum() for label in weights]
    np.testing.assert_allclose(totals, 10 / 3)


def test_of_many_classes_the_note_shows_the_first():
    assert note({1: 5.0, 0: 0.123456}) == "class weights: 0: 0.1235, 1: 5"
    assert note(dict.fromkeys(range(12), 1.0)).endswith("9: 1, ...")
